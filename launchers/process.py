"""A worker process as its parent sees it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from launchers import State, worker


def thread_settings(threads: int) -> dict[str, str]:
    """Environment variables that keep numerical libraries to `threads` threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}


@dataclass
class Worker:
    """One task's process and the pipe it answers through."""

    process: BaseProcess
    answer: Connection

    @staticmethod
    def start(context: Any, assignment: worker.Assignment) -> Worker:
        """Start a process of `context` (a multiprocessing context) on `assignment`. Raises OSError or EOFError."""
        assert isinstance(context, BaseContext)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=worker.run, args=(assignment, sender))  # type: ignore[attr-defined]
        try:
            process.start()
        except BaseException:
            receiver.close()
            raise
        finally:
            sender.close()
        return Worker(process, receiver)

    def kill(self) -> None:
        """End the worker and what it started."""
        pid = self.process.pid
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.process.kill()

    def collect(self, asked: int) -> tuple[State, str]:
        """State and reason of the task, once the process has ended. `asked`: 1 if it was told to stop, 2 if killed."""
        self.process.join()
        code = self.process.exitcode
        verdict: tuple[State, str] | None = None
        with suppress(EOFError, OSError):
            if self.answer.poll():
                verdict = self.answer.recv()
        if verdict is None:
            self.kill()  # what it started, if anything
            verdict = _death(code, asked)
        self.process.close()
        self.answer.close()
        return verdict


def _death(code: int | None, asked: int) -> tuple[State, str]:
    """State and reason of a worker that ended with exit code `code` and without a word."""
    if code is None or code >= 0:
        return "failed", f"ended with status {code} before the task returned (see log.txt)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if asked > 1 and code == -signal.SIGKILL:
        return "stopped", "killed"
    if asked and code == -signal.SIGTERM:
        return "stopped", "ended by SIGTERM"
    hint = "(out of memory?)" if code == -signal.SIGKILL else "(see log.txt)"
    return "failed", f"killed by {name} {hint}"
