"""A sweep's manifest, `sweep.json`: read by anyone, changed by one process at a time."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError
from race_sweeps.folder import write_json

NAME = "sweep.json"


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold the file `lock`, waiting for whoever has it. Freed by the kernel when its holder dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read(folder: Path) -> dict[str, Any]:
    """The manifest of the sweep in `folder`; empty where there is none. Raises `UserError` when it is damaged."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); move it away, the points' folders hold everything") from None
    return content


@contextmanager
def edit(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifest, to be changed in place: written atomically at the end, unless an exception ends the block."""
    with exclusive(folder / ".lock"):
        content = read(folder)
        yield content
        write_json(folder / NAME, content)
