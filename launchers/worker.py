"""What a worker process does, from its first instruction to its outcome."""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import cast

from launchers import Busy, State, Stopped
from race_sweeps.errors import UserError

LONGEST_REASON = 300


@dataclass(frozen=True)
class Assignment:
    """A task with the environment, CPU cores (None: any) and number of threads it runs with."""

    folder: str
    entry: str
    environ: dict[str, str]
    cores: frozenset[int] | None
    threads: int


def nothing() -> None:
    """Ends at once: the first process tells when the fork server has finished importing."""


def run(assignment: Assignment, answer: connection.Connection) -> None:
    """Run the task and send (state, reason) through `answer`. A worker that dies sends nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError):
        os.setsid()  # leads a group of its own, so that whatever it starts can be ended with it
    _end_with_parent()
    verdict = _attempt(assignment)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with suppress(OSError):
        answer.send(verdict)


def _attempt(assignment: Assignment) -> tuple[State, str]:
    try:
        _redirect(Path(assignment.folder))
    except OSError as error:
        return "failed", one_line(f"cannot write the log: {type(error).__name__}: {error}")
    try:
        _apply(assignment)
        _resolve(assignment.entry)(assignment.folder)
    except Stopped as error:
        return "stopped", one_line(str(error))
    except Busy as error:
        return "busy", one_line(str(error)) or "another process is writing this folder"
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return "failed", one_line(str(error))
    except BaseException as error:
        traceback.print_exc()
        message = one_line(f"{type(error).__name__}: {error}".rstrip(": "))
        return "failed", f"{message} (see log.txt)"
    return "done", ""


def one_line(text: str) -> str:
    """`text` on one line, cut where it is too long to be read at a glance."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _redirect(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()


def _apply(assignment: Assignment) -> None:
    """Before the entry is imported: libraries read these when they load. The fork server may have older values."""
    os.environ.clear()
    os.environ.update(assignment.environ)
    if assignment.cores is not None:
        os.sched_setaffinity(0, assignment.cores)
    torch = sys.modules.get("torch")
    if torch is not None:  # loaded in the fork server: too late for its environment variables
        torch.set_num_threads(assignment.threads)


def _resolve(entry: str) -> Callable[[str], None]:
    module, separator, function = entry.partition(":")
    if not separator:
        raise ValueError(f"entry point {entry!r} is not of the form 'package.module:function'")
    return cast(Callable[[str], None], getattr(importlib.import_module(module), function))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "workers are started by multiprocessing"

    def watch() -> None:
        connection.wait([parent.sentinel])
        with suppress(OSError):
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
        os._exit(1)

    if connection.wait([parent.sentinel], timeout=0):  # it died, or gave this process up, while it was being started
        os._exit(1)
    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
