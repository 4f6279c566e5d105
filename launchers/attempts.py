"""What became of each attempt at a task: `attempts.jsonl` in its folder, one row when it begins and one when it ends.

They tell a person, and `status`, what happened; nothing is decided by them. So a full disk loses rows and no work.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers import State

NAME = "attempts.jsonl"


@dataclass(frozen=True)
class Attempt:
    """The newest attempt at a task. `state` None: it has not ended, or ended without a word.

    `job`: as the queue names it, empty on this machine; `restarts`: how often the queue had started the job before.
    """

    host: str
    pid: int
    job: str
    restarts: int
    state: State | None = None
    reason: str = ""

    @property
    def alive(self) -> bool | None:
        """Whether the process that looks after it lives; None when that cannot be told from this machine."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def begin(folder: Path, job: str = "", restarts: int = 0, gpus: str | None = None) -> None:
    """Note that this process begins an attempt."""
    row = {"event": "begin", "host": socket.gethostname(), "pid": os.getpid(), "job": job, "restarts": restarts}
    _append(folder, row | ({"gpus": gpus} if gpus is not None else {}))


def end(folder: Path, state: State, reason: str, seconds: float) -> None:
    """Note how the attempt begun last ended."""
    _append(folder, {"event": "end", "state": state, "reason": reason, "seconds": round(seconds, 3)})


def newest(folder: Path) -> Attempt | None:
    """The attempt begun last; None where there was none or nothing can be read."""
    found: Attempt | None = None
    for row in rows(folder):
        with suppress(KeyError, TypeError):
            if row["event"] == "begin":
                found = Attempt(row["host"], row["pid"], row["job"], row["restarts"])
            elif found is not None:
                found = Attempt(found.host, found.pid, found.job, found.restarts, row["state"], row["reason"])
    return found


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every row that can be read."""
    found = []
    with suppress(OSError):
        for line in (folder / NAME).read_bytes().splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    found.append(row)
    return found


def _append(folder: Path, row: dict[str, Any]) -> None:
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"v": 1, "time": time, **row}, separators=(",", ":")) + "\n")
