"""Problems to train and to evaluate on, from files, the Hub or procedural; no training problem is in an evaluation."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

from race_sweeps import answers
from race_sweeps.config import DataConfig, RunConfig
from race_sweeps.data import chain
from race_sweeps.data.contamination import find
from race_sweeps.data.rows import rows
from race_sweeps.data.text import identity, normalised, share
from race_sweeps.errors import UserError

log = logging.getLogger("race_sweeps")
SHOWN = 5  # examples in a report

Problem = dict[str, Any]
"""`prompt` (text, or a conversation), `question`, `answer` (the reference), `extract` (where a completion's final
answer stands: `answers.final`), `id` (ten hex digits of the normalised question)."""


@dataclass(frozen=True)
class Problems:
    """`train` feeds GRPO; the sets of `evals` ("heldout" first) are only ever evaluated on. `report`: rows read,
    skipped and used of each set, and contamination, as plain JSON."""

    train: list[Problem]
    evals: dict[str, list[Problem]]
    report: dict[str, Any]

    @property
    def heldout(self) -> list[Problem]:
        return self.evals["heldout"]


def load(config: RunConfig, *, chat: bool) -> Problems:
    """The problems of a run. `chat`: the policy's tokenizer has a chat template, so prompts are conversations.

    Raises `UserError` for what cannot be read, bad rows (`data.bad_rows`), too few problems, and contamination where
    `data.contamination` refuses it.
    """
    data, wanted = config.data, config.eval.problems
    report: dict[str, Any] = {"sets": {}, "contamination": {}}
    if data.kind == "chain":
        train = _chain(data, "train", data.train_problems or 4096, chat)
        heldout = _chain(data, data.heldout, wanted, chat)
    else:
        problems = _read(data, "data", chat, report)
        train = [p for text, p in problems if share(text) >= data.heldout_share]
        heldout = [p for text, p in problems if share(text) < data.heldout_share]
        if len(heldout) < wanted:
            raise UserError(
                f"eval.problems={wanted}: {data.path or data.hub} leaves {len(heldout)} held-out problems "
                f"(data.heldout_share={data.heldout_share:g}); lower eval.problems or raise the share"
            )
        train, heldout = train[: data.train_problems], heldout[:wanted]
    evals = {"heldout": heldout}
    for name, source in config.eval.sets.items():
        evals[name] = _evaluation(source, f"eval.sets.{name}", chat, config, report)
    train = _uncontaminated(train, evals, data, report["contamination"])
    if not train:
        raise UserError(f"data.path={data.path}: no training problem left beside those that are evaluated on")
    report["sets"] = {
        name: {**report["sets"].get(name, {}), "problems": len(problems)}
        for name, problems in {"train": train, **evals}.items()
    }
    return Problems(train, evals, report)


def _chain(data: DataConfig, split: str, n: int, chat: bool) -> list[Problem]:
    return [_problem(p["question"], p["answer"], data, chat) for p in chain.problems(split, n, seed=0)]


def _evaluation(source: DataConfig, key: str, chat: bool, config: RunConfig, report: dict[str, Any]) -> list[Problem]:
    if source.kind == "chain":
        return _chain(source, source.heldout, source.limit or config.eval.problems, chat)
    problems = _read(source, key, chat, report)
    if source.limit is not None:  # by hash: the same ones whatever the order of the file
        problems = sorted(problems, key=lambda p: share(p[0]))[: source.limit]
    if not problems:
        raise UserError(f"{key}.path={source.path}: no problem in it")
    return [problem for _, problem in problems]


def _problem(question: str, answer: str, data: DataConfig, chat: bool) -> Problem:
    text = data.prompt.replace("{question}", question)
    return {
        "prompt": [{"role": "user", "content": text}] if chat else text,
        "question": question,
        "answer": answer,
        "extract": data.extract,
        "id": identity(normalised(question)),
    }


def _read(data: DataConfig, key: str, chat: bool, report: dict[str, Any]) -> list[tuple[str, Problem]]:
    """Every problem of a file or Hub data set, with its normalised question; bad rows as `data.bad_rows` says."""
    found, bad, read = [], [], 0
    for place, row in rows(data, key):
        read += 1
        try:
            if isinstance(row, str):
                raise ValueError(row)
            question = _text(row, data.question)
            answer = _reference(row, data)
        except ValueError as error:
            if data.bad_rows == "error":
                raise UserError(f"{place}: {error} (or {key}.bad_rows=skip)") from None
            bad.append(f"{place}: {error}")
            continue
        found.append((normalised(question), _problem(question, answer, data, chat)))
    if not read:
        raise UserError(f"{key}.path={data.path or data.hub}: there is no row in it")
    if bad:
        log.warning("%s: skipped %d of %d rows, the first: %s", data.path or data.hub, len(bad), read, bad[0])
    name = "train" if key == "data" else key.rpartition(".")[2]
    report["sets"][name] = {"rows": read, "skipped": len(bad), "bad": bad[:SHOWN]}
    return found


def _reference(row: dict[str, Any], data: DataConfig) -> str:
    text = _text(row, data.answer, numbers=True)
    try:
        return answers.reference(text, data.reference)
    except ValueError as error:
        raise ValueError(f"field {data.answer!r}: {error}") from None


def _text(row: dict[str, Any], field: str, *, numbers: bool = False) -> str:
    value = row.get(field)
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        what = f" (it is {value!r:.40})" if field in row else ""
        raise ValueError(f"field {field!r} must be text{what}; this row has the fields {', '.join(map(repr, row))}")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"field {field!r} has characters that are no text (NUL or lone surrogates)")
    return value


def _uncontaminated(
    train: list[Problem], evals: dict[str, list[Problem]], data: DataConfig, report: dict[str, Any]
) -> list[Problem]:
    """The training problems that may be trained on; what was found in which evaluation set goes into `report`."""
    texts = [normalised(p["question"]) for p in train]
    removed: set[int] = set()
    for name, problems in evals.items():
        found = find(texts, [normalised(p["question"]) for p in problems], data.ngram, data.overlap)
        report[name] = {
            "action": data.contamination,
            "equal": found.equal,
            "overlapping": found.overlapping,
            "train": len(found.train),
            "examples": [[train[a]["question"], problems[b]["question"]] for a, b in found.pairs[:SHOWN]],
        }
        if not found.train:
            continue
        what = (
            f"{len(found.train)} training problems stand in evaluation set {name!r} ({found.equal} of its problems "
            f"word for word, {found.overlapping} by runs of {data.ngram} words)"
        )
        if data.contamination == "refuse":
            raise UserError(f"data.contamination=refuse: {what}; data.contamination=remove trains without them")
        if data.contamination == "remove":
            removed.update(found.train)
        log.warning("%s%s", what, ": removed" if data.contamination == "remove" else "")
    return [problem for number, problem in enumerate(train) if number not in removed]


class PromptStream:
    """An endless, seeded order over training problems; position k is the same at any time and after any restart."""

    def __init__(self, problems: int, seed: int) -> None:
        self.problems, self.seed = problems, seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.problems)
        if epoch != self._epoch:
            self._order = random.Random(f"prompts {self.seed} {epoch}").sample(range(self.problems), self.problems)
            self._epoch = epoch
        return self._order[offset]
