"""Prepares multiprocessing's fork server, which imports this module (and nothing else) before it serves.

Modules are imported here rather than by the fork server itself because that one dies on any error but ImportError.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

VARIABLE = "LAUNCHERS_PRELOAD"
"""Environment variable of the fork server: a JSON list of module names. Elsewhere this module does nothing."""


def _outlive(_signum: int, _frame: FrameType | None) -> None:
    """The fork server must outlive its workers, which are asked to stop by signals that may reach it too."""


def _restore_in_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _outlive:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _silenced() -> Iterator[None]:
    """Import-time chatter of libraries would tear the table of the parent, whose terminal is shared."""
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in kept:
            os.dup2(null, fd)
        yield
    finally:
        for fd, copy in kept.items():
            os.dup2(copy, fd)
            os.close(copy)
        os.close(null)


def prepare(modules: Sequence[str]) -> None:
    """Leave the terminal's session, survive SIGTERM, import `modules`."""
    with suppress(OSError):
        os.setsid()  # Ctrl-C, hang-ups and signals to the parent's process group are the parent's business
    signal.signal(signal.SIGTERM, _outlive)
    os.register_at_fork(after_in_child=_restore_in_child)
    with suppress(OSError), _silenced():
        for name in modules:
            # What fails here fails again in the worker that needs it, where the user is told.
            with suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, every page of what was imported


if VARIABLE in os.environ:
    prepare(json.loads(os.environ.pop(VARIABLE)))
