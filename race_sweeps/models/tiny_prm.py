"""Embedded tiny process reward models: the Qwen2.5-Math-PRM architecture, trained on step labels of chained arithmetic.

    python -m race_sweeps.models.tiny_prm [NAMES...]      build those (all by default) into the cache

So that process rewards, judges and the axis of their size run on a CPU without a download. Each reads the question and
the solution with a separator after every step (`text_steps`), and is trained, in seconds and from nothing, on solutions
of train-split problems with planted mistakes. `training.json` in its folder holds the recipe and what it reached on the
tune split. Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from race_sweeps.data import chain
from race_sweeps.errors import UserError, choices, exit_status
from race_sweeps.folder import write_json
from race_sweeps.models import ladder
from race_sweeps.models.cache import Progress, build_once, build_side_by_side, cache_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from race_sweeps.models.prm import Qwen2ForProcessRewardModel

FORMAT = 1  # as in the ladder: bump when the building code changes what comes out
SEPARATOR = "<extra_0>"
VOCABULARY = (*ladder.VOCABULARY, SEPARATOR)
_IDS = {token: i for i, token in enumerate(VOCABULARY)}
_RESULT = re.compile(r"= *[0-9]+")
NOISE = chain.Noise(hard=0.4, hard_right=0.4, easy_right=0.7)
"""The policies' misconceptions, and more slips, so that right and wrong steps are about as frequent."""


@dataclass(frozen=True)
class Training:
    """`tokens` read before stopping; `batch`: solutions a step; `rate`, `rise`, `fall`: as in the ladder's warm start.
    `noise`: how often a step of the solutions is wrong. `cut`: share of them that stop early; `astray`: share with a
    step of another question."""

    tokens: int
    batch: int = 32
    rate: float = 3e-3
    rise: int = 50
    fall: float = 0.3
    seed: int = 0
    operations: tuple[int, ...] = (1, 2, 3, 4)
    noise: chain.Noise = NOISE
    cut: float = 0.1
    astray: float = 0.1


@dataclass(frozen=True)
class Size:
    """One process reward model: its backbone's sizes and its training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    training: Training
    spread: float = 0.05


PRMS: dict[str, Size] = {
    "prm-tiny-s": Size(32, 2, 1, 1, 96, Training(tokens=300_000, rate=5e-3), spread=0.1),
    "prm-tiny-m": Size(64, 2, 2, 2, 192, Training(tokens=300_000)),
    "prm-tiny-l": Size(128, 2, 4, 4, 384, Training(tokens=250_000, rate=1e-3)),
}


def size_of(name: str) -> Size:
    """The model of that name; `UserError` for another name."""
    if name not in PRMS:
        raise UserError(f"tiny process reward model {name!r}: {choices(name, PRMS)}")
    return PRMS[name]


def config_dict(name: str, size: Size | None = None) -> dict[str, Any]:
    """The fields of its `config.json`, without building it. `size` stands in for the named one."""
    size = size or size_of(name)
    return {
        "architectures": ["Qwen2ForProcessRewardModel"],
        "model_type": "qwen2",
        "vocab_size": len(VOCABULARY),
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "num_labels": 2,
        "hidden_act": "silu",
        "max_position_embeddings": ladder.MAX_POSITIONS,
        "initializer_range": size.spread,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "pad_token_id": VOCABULARY.index(ladder.PAD),
        "eos_token_id": VOCABULARY.index(ladder.EOS),
        "bos_token_id": None,
        "dtype": "float32",
    }


# --- steps and their labels --------------------------------------------------------------------------------------


def text_steps(completion: str) -> list[str]:
    """A completion cut after each result; what follows the last result is a step of its own. They join to the
    completion again.

    >>> text_steps("7+3=0*8=0-2")
    ['7+3=0', '*8=0', '-2']
    """
    ends = [match.end() for match in _RESULT.finditer(completion)]
    parts = [completion[a:b] for a, b in zip([0, *ends], [*ends, len(completion)], strict=True)]
    return [part for part in parts if part]


def token_ids(question: str, steps: Sequence[str], ended: bool) -> list[int]:
    """What the model reads: the question, each step with a separator after it, and, within the last step, the end mark
    of a completion that `ended`, so that stopping early is a mistake the last step can be marked down for."""
    unknown, ids = _IDS[ladder.UNKNOWN], [_IDS.get(c, _IDS[ladder.UNKNOWN]) for c in question]
    for place, step in enumerate(steps or [""], 1):
        ids += [_IDS.get(c, unknown) for c in step]
        if ended and place == max(1, len(steps)):
            ids.append(_IDS[ladder.EOS])
        ids.append(_IDS[SEPARATOR])
    return ids


def labels(question: str, steps: Sequence[str], ended: bool) -> list[bool]:
    """Whether each step is right: its arithmetic holds, it is the one the question asks for at this place (going on
    from the result written just before, right or wrong), and, for the last step of a completion that `ended`, that
    nothing asked is left out."""
    found = chain.steps("".join(steps), question)
    asked = len(chain.problem(question)["solution"]) // 4
    marks = []
    for place in range(max(1, len(steps))):
        right = place < len(found) and found[place].right and found[place].asked
        last = ended and place == max(1, len(steps)) - 1
        marks.append(right and (not last or place + 1 == asked))
    return marks


# --- building ----------------------------------------------------------------------------------------------------


def path(name: str, size: Size | None = None) -> Path:
    """The model's folder, built or not. Its name carries a hash of everything its weights depend on."""
    size = size or size_of(name)
    recipe = {"format": FORMAT, "config": config_dict(name, size), "size": asdict(size), "vocabulary": VOCABULARY}
    text = json.dumps({**recipe, "torch": version("torch")}, sort_keys=True)
    return cache_folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def build(name: str, progress: Progress | None = None, size: Size | None = None) -> Path:
    """Build the model if the cache lacks it; its folder. Several processes may call this at once; the same recipe gives
    the same weights on one machine. `size` stands in for the named one."""
    size = size or size_of(name)
    report = progress or (lambda share, words: None)

    def write(folder: Path) -> None:
        with ladder.single_threaded():
            _write(folder, name, size, report)

    folder = build_once(path(name, size), write, lambda: report(0.0, "waiting for another build"))
    report(1.0, "ready")
    return folder


def _write(folder: Path, name: str, size: Size, report: Progress) -> None:
    import torch
    from transformers import Qwen2Config

    from race_sweeps.models.prm import Qwen2ForProcessRewardModel

    torch.manual_seed(size.training.seed)
    model = Qwen2ForProcessRewardModel(Qwen2Config(**config_dict(name, size)))
    trained = _train(model, size.training, report)
    report(0.95, "measuring")
    measured = measure(model, "tune")
    with ladder.quiet():
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    recipe = {"v": 1, "name": name, "recipe": asdict(size), "torch": torch.__version__}
    write_json(folder / "training.json", {**recipe, **trained, **measured})


def _train(model: Qwen2ForProcessRewardModel, recipe: Training, report: Progress) -> dict[str, Any]:
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(f"process labels {recipe.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    began, tokens, step, recent = time.perf_counter(), 0, 0, 0.0
    model.train()
    while tokens < recipe.tokens:
        step += 1
        inputs, marks, due, read = _batch(rng, recipe)
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        asked = due >= 0
        facts = torch.nn.functional.linear(hidden[asked], model.model.embed_tokens.weight)
        loss = cross_entropy(model.score(hidden[marks >= 0]), marks[marks >= 0]) + cross_entropy(facts, due[asked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(1.0, step / recipe.rise, (1 - tokens / recipe.tokens) / recipe.fall)
        optimizer.step()
        tokens += read
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        if step % 10 == 0:
            report(0.95 * min(1.0, tokens / recipe.tokens), f"training, loss {recent:.3f}")
    model.eval()
    return {"tokens": tokens, "steps": step, "seconds": round(time.perf_counter() - began, 2), "loss": round(recent, 4)}


def _batch(rng: random.Random, recipe: Training) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Token ids; step labels, -1 off the separators; the right result, where one is due, -1 elsewhere: all (batch,
    longest). And the number of real tokens."""
    import torch

    rows: list[tuple[list[int], list[bool], list[int]]] = []
    while len(rows) < recipe.batch:
        question = chain.random_question(rng, recipe.operations[len(rows) % len(recipe.operations)])
        if chain.split_of(question) == "train":
            steps = text_steps(chain.unreliable_solution(rng, question, recipe.noise))
            spoiled = rng.random()
            if spoiled < recipe.cut:
                steps = steps[: int(rng.random() * len(steps))]
            elif spoiled < recipe.cut + recipe.astray:
                other = text_steps(chain.problem(chain.random_question(rng, len(steps)))["solution"])
                place = int(rng.random() * len(steps))
                steps = [*steps[:place], *other[place:]]
            facts = [_fact(step.text) for step in chain.steps("".join(steps))]
            rows.append((token_ids(question, steps, True), labels(question, steps, True), facts))
    width = max(len(ids) for ids, _, _ in rows)
    inputs = torch.full((len(rows), width), _IDS[ladder.PAD])
    marks, due = torch.full_like(inputs, -1), torch.full_like(inputs, -1)
    for i, (ids, right, facts) in enumerate(rows):
        inputs[i, : len(ids)] = torch.tensor(ids)
        marks[i][inputs[i] == _IDS[SEPARATOR]] = torch.tensor(right).long()
        equals = (inputs[i] == _IDS["="]).nonzero().flatten()[1:]  # the first one ends the question
        due[i][equals] = torch.tensor(facts, dtype=torch.long)
    return inputs, marks, due, sum(len(ids) for ids, _, _ in rows)


def _fact(equation: str) -> int:
    """The token of an equation's right result."""
    left, operator, right = equation[0], equation[1], equation[2]
    return _IDS[str(chain.apply(int(left), operator, int(right)))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The ladder's tokenizer and the separator."""
    tokenizer = ladder.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [SEPARATOR]})
    return tokenizer


def measure(model: Qwen2ForProcessRewardModel, split: str, problems: int = 512) -> dict[str, Any]:
    """How well step scores tell right from wrong steps of solutions that the ladder's noise writes for a held-out
    split: area under the ROC curve, accuracy at 0.5, and the share of right steps."""
    import torch

    from race_sweeps.process_labels import auc

    rng = random.Random(f"process labels {split}")
    rows = []
    for row in chain.problems(split, problems, seed=0):
        steps = text_steps(chain.unreliable_solution(rng, row["question"], ladder.NOISE))
        rows.append((token_ids(row["question"], steps, True), labels(row["question"], steps, True)))
    inputs = torch.full((len(rows), max(len(ids) for ids, _ in rows)), _IDS[ladder.PAD])
    for i, (ids, _) in enumerate(rows):
        inputs[i, : len(ids)] = torch.tensor(ids)
    scores = model.probabilities(inputs)[inputs == _IDS[SEPARATOR]].tolist()
    right = [mark for _, marks in rows for mark in marks]
    return {
        f"{split}_steps": len(right),
        f"{split}_right": round(sum(right) / len(right), 4),
        f"{split}_auc": round(auc(scores, right), 4),
        f"{split}_accuracy": round(sum((s >= 0.5) == r for s, r in zip(scores, right, strict=True)) / len(right), 4),
    }


# --- command line ------------------------------------------------------------------------------------------------


def jobs(names: Iterable[str]) -> dict[str, Callable[[Progress], Path]]:
    """What builds those that the cache lacks, largest first, for `build_side_by_side`."""
    missing = [name for name in dict.fromkeys(names) if not path(name).exists()]
    return {name: partial(build, name) for name in sorted(missing, key=lambda name: -size_of(name).hidden)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named models (default: all) and print what they reached."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m race_sweeps.models.tiny_prm", description="Build the embedded process reward models."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PRMS)} (default: all)")
    names = list(dict.fromkeys(parser.parse_args(arguments).names)) or list(PRMS)

    def build_and_show() -> int:
        build_side_by_side(jobs(names))
        for name in names:
            reached = json.loads((path(name) / "training.json").read_text(encoding="utf-8"))
            print(
                f"{name}: built in {reached['seconds']:.0f} s; AUC {reached['tune_auc']:.3f} on "
                f"{reached['tune_steps']} held-out steps ({reached['tune_right']:.0%} right); {path(name)}"
            )
        return 0

    return exit_status("tiny_prm", build_and_show)


if __name__ == "__main__":
    raise SystemExit(main())
