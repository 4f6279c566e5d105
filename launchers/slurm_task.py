"""What runs in each element of an array: it looks after the task's process, and puts the job back when it must.

The process of the task knows SIGTERM only: checkpoint and raise `Stopped`. SLURM's warning before the time limit
(SIGUSR2) and before a preemption (SIGTERM) become that; afterwards SLURM is asked whether the job still runs, for the
same SIGTERM comes from `scancel`, and a cancelled job must not rise again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import FrameType

from launchers import State, attempts, cluster
from launchers.process import Worker
from launchers.worker import Assignment
from race_sweeps.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
PREDECESSOR_SECONDS = 120
"""On a lost node the job's earlier process may live, and hold the folder, until SLURM reaches it."""


@dataclass(frozen=True)
class SlurmTask:
    """Called by submitit in the job, with nothing but the task's folder and entry point.

    It returns when the task is done, or is being done elsewhere; else it ends its process with status 1, and SLURM
    calls the job FAILED. Why is in the folder: `log.txt`, `attempts.jsonl`.
    """

    folder: str
    entry: str
    threads: int
    max_requeues: int

    def __call__(self) -> None:
        folder = Path(self.folder)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        job = os.environ["SLURM_JOB_ID"]
        attempts.begin(folder, _element(), restarts, os.environ.get("CUDA_VISIBLE_DEVICES"))
        began = time.monotonic()
        state: State
        if restarts > self.max_requeues:
            state, reason, again = "failed", f"started again {restarts} times; max_requeues={self.max_requeues}", False
        else:
            state, reason, again = self._attempt(job, restarts)
        attempts.end(folder, state, reason, time.monotonic() - began)
        if again:
            try:
                cluster.requeue(job)
            except UserError as error:
                attempts.end(folder, "failed", f"could not be put back into the queue: {error}", 0.0)
                sys.exit(1)
        sys.exit(1 if state in ("failed", "stopped") and not again else 0)

    def _attempt(self, job: str, restarts: int) -> tuple[State, str, bool]:
        """State, reason, and whether to put the job back."""
        assignment = Assignment(self.folder, self.entry, dict(os.environ), None, self.threads)
        patience = time.monotonic() + (PREDECESSOR_SECONDS if restarts else 0)
        with _Supervision() as supervision:
            state, reason = supervision.run(assignment)
            while state == "busy" and not supervision.asked and time.monotonic() < patience:
                time.sleep(5)
                state, reason = supervision.run(assignment)
        if state != "stopped":
            return state, reason, False
        for signum in SIGNALS:  # what is asked of SLURM from here on must outlive what SLURM sends to all of the job
            signal.signal(signum, signal.SIG_IGN)
        try:
            still_runs = cluster.running(job)
        except UserError as error:
            return "failed", f"{reason}; not put back into the queue: {error}", False
        if not still_runs:
            return "stopped", f"cancelled or ended by SLURM; {reason}", False
        why = "time limit" if supervision.timed_out else "preempted"
        if restarts >= self.max_requeues:
            return "failed", f"{why}, but max_requeues={self.max_requeues} are used up; {reason}", False
        return "stopped", f"{why}; back in the queue ({restarts + 1} of {self.max_requeues}); {reason}", True


def _element() -> str:
    """This job as the sweep's manifest names it."""
    environ = os.environ
    return cluster.element(
        environ.get("SLURM_ARRAY_JOB_ID", environ["SLURM_JOB_ID"]), environ.get("SLURM_ARRAY_TASK_ID")
    )


@dataclass
class _Supervision:
    """One worker process at a time, told to stop by either signal."""

    timed_out: bool = False
    asked: bool = False
    _worker: Worker | None = None
    _before: dict[signal.Signals, object] = field(default_factory=dict)

    def __enter__(self) -> _Supervision:
        for signum in SIGNALS:
            self._before[signum] = signal.signal(signum, self._receive)
        self._before[signal.SIGCONT] = signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit would log each
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def run(self, assignment: Assignment) -> tuple[State, str]:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the new process is not to act as this one does
        try:
            worker = self._worker = Worker.start(_Context(), assignment)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.asked:  # before it was there to be told
            worker.process.terminate()
        connection.wait([worker.process.sentinel])
        self._worker = None
        return worker.collect(asked=int(self.asked))

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        self.asked = True
        self.timed_out = self.timed_out or signum == signal.SIGUSR2
        if self._worker is not None:
            self._worker.process.terminate()


class _Process(multiprocessing.context.ForkProcess):
    def run(self) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM warns every process of the job; one of them acts on it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        super().run()


class _Context(multiprocessing.context.ForkContext):
    Process = _Process
