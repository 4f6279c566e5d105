"""Where a run keeps its files, and how they are written so that a kill at any moment leaves them readable.

runs/<sweep>/sweep.json
runs/<sweep>/points/<point_id>/{config.yaml, plan.json, data.json, ledger.jsonl, metrics.jsonl, evals.jsonl, evals/,
                                rollouts/, checkpoints/, result.json, log.txt}
SIMULATED, in both: see `mark_simulated`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Paths of one grid point. Nothing is created until something is written."""

    path: Path

    @property
    def point_id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def data(self) -> Path:
        """What was read, skipped and used of each set of problems, and contamination."""
        return self.path / "data.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

    def outcomes(self, rung: int, name: str) -> Path:
        """Per-completion outcomes of one evaluation."""
        return self.path / "evals" / f"rung-{rung}-{name}.parquet"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def done(self) -> bool:
        """`result.json` is written last and atomically: its presence means done. A damaged one does not count: the run
        is taken up again and writes a new one."""
        try:
            return isinstance(json.loads(self.result.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            return False


def mark_simulated(path: Path) -> None:
    """Say in the folder of a sweep or a point, for whoever lists it, that nothing in it was measured."""
    if not (path / "SIMULATED").exists():
        text = "No model was trained here: every value comes from a response surface (trainer=simulated).\n"
        write_atomic(path / "SIMULATED", text)


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a restart after a power cut, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and new files in `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Atomically write `value` as indented JSON."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def json_line(row: dict[str, Any]) -> str:
    """A row of a JSONL file, its newline included."""
    return json.dumps(row, separators=(",", ":")) + "\n"


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a JSONL file, flushed and fsynced once for all of them."""
    text = "".join(json_line(row) for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path, on_torn: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file, in order; nothing if the file is absent.

    A last line without its newline, or that does not parse, was torn by a kill during the write: it is dropped and
    `on_torn` is told. Any other damage raises `UserError` naming the file and the line.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    tail = lines.pop()  # empty when the file ends with a newline
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines) and not tail:
                tail = line
                break
            raise UserError(f"{path}: line {number} is damaged ({error}); restore it from a copy") from None
        yield row
    if tail and on_torn is not None:
        on_torn(f"{path}: dropped a torn last line of {len(tail)} bytes")


def rewrite_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep only the rows that pass `keep` (a torn tail goes too). The rewrite is atomic."""
    if path.exists():
        rows = [row for row in read_rows(path) if keep(row)]
        write_atomic(path, "".join(json_line(row) for row in rows))


@contextmanager
def single_writer(folder: RunFolder) -> Iterator[bool]:
    """Hold the folder's lock; yields False, without it, when another process has it. Freed by the kernel on death."""
    import fcntl

    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
