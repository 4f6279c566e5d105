"""Where and when tasks run. Nothing here knows what a task computes: it has a folder, an entry point and a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from race_sweeps.errors import Busy, Stopped

__all__ = ["Busy", "Launcher", "Outcome", "Progress", "State", "Stopped", "Task"]

State = Literal["done", "failed", "stopped", "busy", "submitted"]


@dataclass(frozen=True)
class Task:
    """One unit of work.

    `entry` is "package.module:function", called as `function(str(folder))` in a process of its own: it returns None
    or raises: `Busy` (another process is writing this folder), `Stopped` (it was asked to stop by SIGTERM and saved its
    work; running it again continues), or anything else, which fails this task only. `folder / "log.txt"` receives
    what it prints. `id` and `label` are shown to the user. `gpus`: how many it uses; `hours`: how long it is expected
    to take, None where nobody knows.
    """

    id: str
    folder: Path
    entry: str
    label: dict[str, str]
    gpus: int = 0
    hours: float | None = None


@dataclass(frozen=True)
class Progress:
    """Work done so far and in total, in the caller's unit (total 0: not known yet), and a short remark."""

    done: float
    total: float
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a task ended, or "submitted" when it was handed to a queue as `job`.

    `reason` is one line, empty when done; `seconds` is wall time, 0 if it never started.
    """

    id: str
    state: State
    reason: str
    seconds: float
    job: str = ""


class Launcher(Protocol):
    """What the command line needs of a launcher; Hydra's `hydra/launcher` group names one."""

    def check(self) -> None:
        """Raise `UserError` if nothing could be launched from here."""

    def launch(
        self, tasks: Sequence[Task], progress: Callable[[Path], Progress], unit: Callable[[float], str]
    ) -> list[Outcome]:
        """Run `tasks`, or hand them to a queue, and return their outcomes in the same order."""
