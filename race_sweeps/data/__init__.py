"""Problems: rows of {"prompt", "question", "answer"}, in disjoint training and held-out sets."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race_sweeps import answers
from race_sweeps.config import DataConfig, RunConfig
from race_sweeps.data import chain
from race_sweeps.errors import UserError

Problem = dict[str, Any]


@dataclass(frozen=True)
class Problems:
    """`train` feeds GRPO, `heldout` is only ever evaluated on."""

    train: list[Problem]
    heldout: list[Problem]


def load(config: RunConfig, *, chat: bool) -> Problems:
    """The problems of a run. `chat`: the policy's tokenizer has a chat template, so prompts are conversations."""
    data, wanted = config.data, config.eval.problems
    if data.kind == "chain":
        train = chain.problems("train", data.train_problems or 4096, seed=0)
        heldout = chain.problems(data.heldout, wanted, seed=0)
    else:
        train, heldout = _from_file(data)
        if len(heldout) < wanted:
            raise UserError(
                f"eval.problems={wanted}: {data.path} leaves {len(heldout)} held-out problems "
                f"(data.heldout_share={data.heldout_share:g}); lower eval.problems or raise the share"
            )
        heldout = heldout[:wanted]
        train = train[: data.train_problems]
    if not train:
        raise UserError(f"data.path={data.path}: no training problem left beside the held-out ones")
    return Problems([_row(p, data, chat) for p in train], [_row(p, data, chat) for p in heldout])


def _row(problem: dict[str, str], data: DataConfig, chat: bool) -> Problem:
    text = data.prompt.replace("{question}", problem["question"])
    prompt = [{"role": "user", "content": text}] if chat else text
    return {"prompt": prompt, "question": problem["question"], "answer": problem["answer"]}


def _from_file(data: DataConfig) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Split a JSONL file by a hash of the question: the same question is always on the same side."""
    if data.path is None:
        raise UserError(f"data.path: data={data.name} reads a file; set data.path=<a JSONL file>")
    sides: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for number, row in _rows(Path(data.path)):
        where = f"{data.path}: line {number}"
        problem = {"question": _text(row, data.question, where), "answer": _text(row, data.answer, where)}
        try:
            problem["answer"] = answers.reference(problem["answer"], data.reference)
        except ValueError as error:
            raise UserError(f"{where}: field {data.answer!r}: {error}") from None
        share = int.from_bytes(hashlib.sha256(problem["question"].encode()).digest()[:8], "big") / 2**64
        sides[share < data.heldout_share].append(problem)
    return sides


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSONL file; blank lines are passed over. Raises `UserError` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.path={path}: cannot be read as text ({error}); give a JSONL file") from None
    if not any(line.strip() for line in lines):
        raise UserError(f"data.path={path}: the file is empty; give a JSONL file")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}: line {number}: not JSON ({error}); JSONL has one object a line") from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}: line {number}: not an object but a {type(row).__name__}; JSONL has one a line"
                )
            yield number, row


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: field {field!r} must be text; this row has the fields {', '.join(map(repr, row))}")
    return value


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
