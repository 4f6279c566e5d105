"""Where and when tasks run. Nothing here knows what a task computes: it has a folder, an entry point and a label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from race_sweeps.errors import Busy, Stopped

__all__ = ["Busy", "Outcome", "Progress", "State", "Stopped", "Task"]

State = Literal["done", "failed", "stopped", "busy"]


@dataclass(frozen=True)
class Task:
    """One unit of work.

    `entry` is "package.module:function", called as `function(str(folder))` in a process of its own: it returns None
    or raises: `Busy` (another process is writing this folder), `Stopped` (it was asked to stop by SIGTERM and saved its
    work; running it again continues), or anything else, which fails this task only. `folder / "log.txt"` receives what
    it prints. `id` and `label` are shown to the user.
    """

    id: str
    folder: Path
    entry: str
    label: dict[str, str]


@dataclass(frozen=True)
class Progress:
    """Work done so far and in total, in the caller's unit (total 0: not known yet), and a short remark."""

    done: float
    total: float
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a task ended. `reason` is one line, empty when done; `seconds` is wall time, 0 if it never started."""

    id: str
    state: State
    reason: str
    seconds: float
