"""Step labels of other people's process-supervision data in one form, and how well a scorer reproduces them.

The convention is ProcessBench's (Zheng et al. 2024, arXiv 2412.06559): steps count from 0, the label of a solution is
the position of its first wrong step, -1 when every step is right. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError, choices

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Labelled:
    """A solution with step labels: True right, False wrong, None where the data does not say (after a first error)."""

    question: str
    steps: tuple[str, ...]
    right: tuple[bool | None, ...]

    @property
    def first_error(self) -> int:
        """ProcessBench's label."""
        return next((place for place, mark in enumerate(self.right) if mark is False), -1)


def read(path: Path, kind: str) -> list[Labelled]:
    """The labelled solutions of a file: a JSON array, or one JSON object a line. `kind`: one of `READERS`. Raises
    `UserError` naming the file, the row (from 1) and the field."""
    if kind not in READERS:
        raise UserError(f"process labels {kind!r}: {choices(kind, READERS)}")
    found = []
    for number, row in _rows(path):
        try:
            found += list(READERS[kind](row))
        except _Bad as error:
            raise UserError(f"{path}: row {number}: {error}") from None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path}: row {number}: not a row of {kind}: {what}") from None
    return found


class _Bad(ValueError):
    """A row's value that cannot be used: the field and what it should be."""


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    if text.lstrip().startswith("["):
        try:
            yield from enumerate(json.loads(text), 1)
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error})") from None
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}: row {number}: not JSON ({error})") from None


def _upto(steps: Sequence[str], first_error: int, field: str) -> tuple[bool | None, ...]:
    """Labels of `steps` from the position of the first wrong one (-1: none)."""
    if isinstance(first_error, bool) or not isinstance(first_error, int) or not -1 <= first_error < len(steps):
        raise _Bad(f"{field}={first_error!r} of {len(steps)} steps")
    if first_error == -1:
        return (True,) * len(steps)
    return (*(True,) * first_error, False, *(None,) * (len(steps) - first_error - 1))


def _processbench(row: Row) -> Iterator[Labelled]:
    yield Labelled(row["problem"], tuple(row["steps"]), _upto(row["steps"], row["label"], "label"))


def _mr_gsm8k(row: Row) -> Iterator[Labelled]:
    """Steps count from 1."""
    steps, field = row["model_output_steps"], "model_output_solution_first_error_step"
    right = row["model_output_solution_correctness"] == "correct"
    if not right and not (isinstance(row[field], int) and row[field] >= 1):
        raise _Bad(f"{field}={row[field]!r} of {len(steps)} steps; they count from 1")
    yield Labelled(row["question"], tuple(steps), _upto(steps, -1 if right else row[field] - 1, field))


def _bigbench_mistake(row: Row) -> Iterator[Labelled]:
    """Steps count from 0; null: no mistake."""
    at = row["mistake_index"]
    steps = row["steps"]
    yield Labelled(row["input"], tuple(steps), _upto(steps, -1 if at is None else at, "mistake_index"))


def _prm800k(row: Row) -> Iterator[Labelled]:
    """The path that the labeller took (completions chosen, or written where none was right), and every other rated
    completion as the end of a solution of its own. Ratings 1 and 0 are right, -1 is wrong."""
    question, path = row["question"]["problem"], list[str]()
    marks: list[bool | None] = []
    followed = True
    for step in row["label"]["steps"]:
        chosen = step["chosen_completion"]
        for place, other in enumerate(step["completions"] or []):
            if place != chosen and other["rating"] is not None:
                yield Labelled(question, (*path, other["text"]), (*marks, other["rating"] >= 0))
        if chosen is not None:
            taken = step["completions"][chosen]
            path.append(taken["text"])
            marks.append(taken["rating"] >= 0)
        elif step["human_completion"] is not None:
            path.append(step["human_completion"]["text"])
            marks.append(True)
        else:
            followed = False
            break
    if followed and path:
        yield Labelled(question, tuple(path), tuple(marks))


_SHEPHERD_STEP = re.compile(r"(?=Step \d+:)")


def _math_shepherd(row: Row) -> Iterator[Labelled]:
    """`label` is the text of `input` with + or - where that has its step mark."""
    question, *steps = _SHEPHERD_STEP.split(row["label"])
    marks = [step.rstrip()[-1:] for step in steps]
    if not steps or any(mark not in ("+", "-") for mark in marks):
        raise _Bad("label: 'Step 1:', ... each ending in + or -")
    texts = tuple(step.rstrip()[:-1].rstrip() for step in steps)
    yield Labelled(question.strip(), texts, tuple(mark == "+" for mark in marks))


def _math_aps(row: Row) -> Iterator[Labelled]:
    """Prefixes with the share of roll-outs from them that reach the answer (`mc_value`, 0: wrong), as a list or as a
    tree. A solution is a prefix that no other continues; its steps are cut where shorter prefixes end."""
    question, nodes = row["question"], row["reasoning_steps"]
    if isinstance(nodes, Mapping):
        yield from _tree(question, nodes["children"], (), ())
        return
    values = {node["solution_prefix"]: node["mc_value"] for node in nodes}
    values.pop(question, None)
    ordered = sorted(values)
    for place, prefix in enumerate(ordered):
        if place + 1 < len(ordered) and ordered[place + 1].startswith(prefix):
            continue
        ends = sorted((p for p in values if prefix.startswith(p)), key=len)
        starts = [question, *ends]
        steps = tuple(end[len(start) :].strip() for start, end in zip(starts, ends, strict=False))
        yield Labelled(question, steps, tuple(values[end] > 0 for end in ends))


def _tree(question: str, nodes: Sequence[Row], steps: tuple[str, ...], right: tuple[bool, ...]) -> Iterator[Labelled]:
    for node in nodes:
        path, marks = (*steps, node["text"]), (*right, node["mc_value"] > 0)
        if node["children"]:
            yield from _tree(question, node["children"], path, marks)
        else:
            yield Labelled(question, path, marks)


READERS: dict[str, Callable[[Row], Iterator[Labelled]]] = {
    "processbench": _processbench,
    "mr_gsm8k": _mr_gsm8k,
    "bigbench_mistake": _bigbench_mistake,
    "prm800k": _prm800k,
    "math_shepherd": _math_shepherd,
    "math_aps": _math_aps,
}


# --- how well scores reproduce labels ----------------------------------------------------------------------------


def first_error(scores: Sequence[float], threshold: float = 0.5) -> int:
    """The label that step scores give: the position of the first step below `threshold`, -1 for none."""
    return next((place for place, score in enumerate(scores) if score < threshold), -1)


@dataclass(frozen=True)
class Agreement:
    """`auc` over labelled steps (None where all are of one kind); ProcessBench's accuracies and their harmonic mean
    (None where there are no solutions of that kind)."""

    solutions: int
    steps: int
    auc: float | None
    wrong_accuracy: float | None
    right_accuracy: float | None

    @property
    def f1(self) -> float | None:
        a, b = self.wrong_accuracy, self.right_accuracy
        if a is None or b is None:
            return None
        return 2 * a * b / (a + b) if a + b else 0.0


def agreement(solutions: Sequence[Labelled], scores: Sequence[Sequence[float]], threshold: float = 0.5) -> Agreement:
    """How far step scores (one sequence per solution, one score per step) agree with the labels."""
    hits: dict[bool, list[bool]] = {True: [], False: []}
    flat: list[tuple[float, bool]] = []
    for solution, row in zip(solutions, scores, strict=True):
        flat += [(s, mark) for s, mark in zip(row, solution.right, strict=True) if mark is not None]
        hits[solution.first_error == -1].append(first_error(row, threshold) == solution.first_error)
    both = len({mark for _, mark in flat}) == 2
    right, wrong = hits[True], hits[False]
    return Agreement(
        solutions=len(solutions),
        steps=len(flat),
        auc=auc([s for s, _ in flat], [mark for _, mark in flat]) if both else None,
        wrong_accuracy=sum(wrong) / len(wrong) if wrong else None,
        right_accuracy=sum(right) / len(right) if right else None,
    )


def auc(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Area under the ROC curve: the chance that a right step scores above a wrong one, ties counting half. Raises
    `ValueError` when only one kind is there."""
    positives = sum(right)
    negatives = len(right) - positives
    if not positives or not negatives or len(scores) != len(right):
        raise ValueError(f"AUC of {positives} right and {negatives} wrong steps, {len(scores)} scores")
    order = sorted(range(len(scores)), key=scores.__getitem__)
    below, twice, start = 0, 0, 0  # wrong steps seen so far; pairs won, doubled so that ties stay integers
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        tied = sum(right[i] for i in order[start:end])
        twice += tied * (2 * below + (end - start - tied))
        below += end - start - tied
        start = end
    return twice / (2 * positives * negatives)
