"""Training problems that stand in an evaluation set too, word for word or nearly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from race_sweeps.data.text import grams


@dataclass(frozen=True)
class Contamination:
    """`equal`: evaluation problems whose normalised text is a training problem's; `overlapping`: further ones that
    share enough runs of words with one training problem. `train`: indices of the training problems found; `pairs`: of
    these and the evaluation problems they were found in."""

    equal: int
    overlapping: int
    train: list[int]
    pairs: list[tuple[int, int]]


def find(train: Sequence[str], evaluation: Sequence[str], n: int, overlap: float) -> Contamination:
    """Compare normalised questions. An evaluation question is found when one training question equals it, or has at
    least the share `overlap` of its runs of `n` words."""
    places: dict[str, list[int]] = defaultdict(list)
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    needed: list[float] = []
    for place, text in enumerate(evaluation):
        places[text].append(place)
        runs = grams(text, n)
        needed.append(overlap * len(runs))
        for run in runs:
            holders[run].append(place)
    equal: set[int] = set()
    near: set[int] = set()
    pairs = []
    for number, text in enumerate(train):
        same = places.get(text, [])
        equal.update(same)
        shared = Counter(p for run in grams(text, n) if run in holders for p in holders[run])
        close = [place for place, runs in shared.items() if runs >= needed[place]]
        near.update(close)
        pairs += [(number, place) for place in sorted({*same, *close})]
    return Contamination(len(equal), len(near - equal), sorted({number for number, _ in pairs}), pairs)
