"""The compute ledger of one run: `ledger.jsonl`, append-only, one row per (optimizer step, phase).

A restart writes a `resume` row that names the last step it kept; earlier rows with a later step were lost work. They
are summed as lost, never counted twice and never forgotten. A torn last line is dropped; other damage is an error.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError
from race_sweeps.flops import Flops
from race_sweeps.folder import append_rows, json_line, read_rows, write_atomic

PHASES = ("search", "learning", "reward", "eval")


@dataclass(frozen=True)
class Tokens:
    """Token counts of a row: `cached` prompt tokens came from a prefix cache, `modelled` of them by our reckoning where
    the engine did not report it; `trained` were in a training pass."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    trained: int = 0
    modelled: int = 0

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Row:
    """Work of one phase in one optimizer step. `rows`: completions generated, trained, scored or evaluated."""

    step: int
    phase: str
    flops: Flops
    tokens: Tokens
    rows: int
    seconds: float
    attempt: int = 1

    def plus(self, flops: Flops, tokens: Tokens, rows: int, seconds: float) -> Row:
        """The row with more work of the same step and phase."""
        more = (self.flops.plus(flops), self.tokens.plus(tokens), self.rows + rows, self.seconds + seconds)
        return Row(self.step, self.phase, *more, self.attempt)

    def to_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            "step": self.step,
            "phase": self.phase,
            "model_flops": self.flops.model,
            "executed_flops": self.flops.executed,
            "paper_flops": self.flops.paper,
            "tokens": vars(self.tokens),
            "rows": self.rows,
            "seconds": round(self.seconds, 4),
            "attempt": self.attempt,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        }

    @staticmethod
    def from_json(row: dict[str, Any], where: str) -> Row:
        try:
            values = (row["model_flops"], row["executed_flops"], row["paper_flops"])
            if row["phase"] not in PHASES or not all(isinstance(v, int) and v >= 0 for v in (*values, row["step"])):
                raise ValueError("phase, step or FLOPs out of range")
            return Row(
                step=row["step"],
                phase=row["phase"],
                flops=Flops(*values),
                tokens=Tokens(**row["tokens"]),
                rows=row["rows"],
                seconds=row["seconds"],
                attempt=row["attempt"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: not a ledger row ({error}); restore the file from a copy") from None


@dataclass
class Totals:
    """Sums over rows, per phase."""

    flops: dict[str, Flops] = field(default_factory=lambda: dict.fromkeys(PHASES, Flops()))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    def add(self, row: Row) -> None:
        self.flops[row.phase] = self.flops[row.phase].plus(row.flops)
        self.seconds[row.phase] += row.seconds
        self.rows[row.phase] += row.rows

    def model(self, phase: str) -> int:
        return self.flops[phase].model

    @property
    def total(self) -> int:
        """C_total in the model convention: search, learning and reward; evaluation stays outside."""
        return sum(self.flops[p].model for p in PHASES if p != "eval")

    @property
    def rho(self) -> float | None:
        """Achieved update fraction; None before any compute was spent."""
        return self.flops["learning"].model / self.total if self.total else None


@dataclass
class Ledger:
    """What a ledger file says: the rows that count, in order, and the rows that were lost."""

    rows: list[Row]
    lost: list[Row]
    attempts: int

    @property
    def totals(self) -> Totals:
        totals = Totals()
        for row in self.rows:
            totals.add(row)
        return totals

    @property
    def lost_flops(self) -> int:
        """Model FLOPs of superseded work in search, learning and reward."""
        return sum(row.flops.model for row in self.lost if row.phase != "eval")


def read(path: Path, on_torn: Callable[[str], None] | None = None) -> Ledger:
    """Read a ledger. Later rows of the same (step, phase) supersede earlier ones."""
    current: dict[tuple[int, str], Row] = {}
    lost: list[Row] = []
    attempts = 0
    for number, item in enumerate(read_rows(path, on_torn), 1):
        if item.get("phase") == "resume":
            if not isinstance(item.get("step"), int) or not isinstance(item.get("attempt"), int):
                raise UserError(f"{path}: line {number}: a resume row needs step and attempt")
            kept = item["step"]
            lost += [row for key, row in current.items() if key[0] > kept]
            current = {key: row for key, row in current.items() if key[0] <= kept}
            attempts = max(attempts, item["attempt"])
            continue
        row = Row.from_json(item, f"{path}: line {number}")
        key = (row.step, row.phase)
        if key in current:
            lost.append(current.pop(key))
        current[key] = row
        attempts = max(attempts, row.attempt)
    return Ledger(list(current.values()), lost, attempts)


class LedgerWriter:
    """Appends to one ledger, for one attempt that continues after `resume_step`.

    Rows reach the operating system at once, so no kill of the process loses them. The disk (milliseconds) is waited for
    by a thread while training goes on, and by the next `write` or `sync` if it is slower: a power cut costs the rows of
    one step at most, which the ledger's reader takes like a torn line.
    """

    def __init__(self, path: Path, resume_step: int = 0, on_torn: Callable[[str], None] | None = None) -> None:
        self.path = path
        if path.exists():
            _drop_torn_tail(path, on_torn)
        self.attempt = read(path).attempts + 1
        if self.attempt > 1:
            append_rows(path, [{"v": 1, "step": resume_step, "phase": "resume", "attempt": self.attempt}])
        self._file = path.open("a", encoding="utf-8")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._pending: Future[None] | None = None

    def write(self, rows: Iterable[Row]) -> None:
        """Append rows, once the ones before are on disk."""
        self.sync()
        self._file.write("".join(json_line(row.to_json()) for row in rows))
        self._file.flush()
        self._pending = self._disk.submit(os.fsync, self._file.fileno())

    def sync(self) -> None:
        """Wait until every row is on disk. Raises what the disk said (`OSError`)."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def _drop_torn_tail(path: Path, on_torn: Callable[[str], None] | None) -> None:
    """Appending after a torn line would glue two rows together: cut it off first."""
    torn: list[str] = []
    rows = list(read_rows(path, torn.append))
    if torn:
        if on_torn is not None:
            on_torn(torn[0])
        lines = path.read_bytes().split(b"\n")[: len(rows)]
        write_atomic(path, b"".join(line + b"\n" for line in lines).decode())
