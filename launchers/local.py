"""Runs tasks on this machine: a fixed number of worker processes, each on CPU cores or a GPU of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType, ModuleType
from typing import cast

from launchers import Outcome, Progress, State, Task, attempts, preload, worker
from launchers.process import Worker, thread_settings
from launchers.table import Board, Display, clock, console_on, display_on, say
from race_sweeps.errors import UserError

BEAT = 0.2
"""Seconds between two looks at the signals received and at the display."""

SAME = 0.5
"""Signals closer than this many seconds are one: `timeout` and closing terminals send theirs twice."""


@dataclass(frozen=True)
class Slot:
    """What one worker has for itself: a GPU (as CUDA_VISIBLE_DEVICES names it), or CPU cores; neither: any core."""

    gpu: str | None = None
    cores: frozenset[int] | None = None


def visible_gpus() -> list[str]:
    """GPUs this process may use, named as CUDA_VISIBLE_DEVICES does, without loading CUDA."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        names = [name.strip() for name in allowed.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # as CUDA reads it
        return names[:end]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(listing)


def parse_gpus(listing: str) -> list[str]:
    """Names from `nvidia-smi -L`: a GPU's index, or the identifiers of its MIG slices where it is cut into them."""
    found: list[list[str]] = []
    for line in listing.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            found.append([match[1]])
        elif found and (match := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)):
            found[-1].append(match[1])
    return [name for gpu, *slices in found for name in (slices or [gpu])]


def usable_cores() -> list[int]:
    """CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def make_slots(workers: int | None, threads: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Slot]:
    """One slot per worker; by default one worker per GPU, else one per `threads` cores.

    More workers than GPUs share them in turn. More threads than cores: nobody is pinned, the kernel balances.
    """
    if gpus:
        return [Slot(gpu=gpus[i % len(gpus)]) for i in range(workers or len(gpus))]
    count = workers or max(1, len(cores) // threads)
    if count * threads > len(cores) or not hasattr(os, "sched_setaffinity"):
        return [Slot()] * count
    return [Slot(cores=frozenset(cores[i * threads : (i + 1) * threads])) for i in range(count)]


@dataclass
class _Running:
    task: Task
    slot: Slot
    worker: Worker
    began: float


@dataclass
class _Signals:
    """SIGINT, SIGTERM and SIGHUP received while in use (in the main thread; elsewhere they are left alone).

    They are counted; only within `interrupt` do they raise KeyboardInterrupt.
    """

    received: int = 0
    _last: float = 0.0
    _interrupting: bool = False
    _before: dict[signal.Signals, object] = field(default_factory=dict)

    def __enter__(self) -> _Signals:
        if current_thread() is main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number is signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def interrupt(self) -> Iterator[None]:
        """Let a signal, also one that has come already, end the block with KeyboardInterrupt."""
        self._interrupting = True
        try:
            if self.received:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupting = False

    @contextmanager
    def ignore_interrupts(self) -> Iterator[None]:
        if signal.SIGINT not in self._before:
            yield
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, _signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self._last < SAME:
            return
        self._last = now
        self.received += 1
        if self._interrupting:
            raise KeyboardInterrupt


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Multiprocessing runs the parent's main script again in each child, for functions defined there. None are."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@dataclass
class LocalLauncher:
    """Runs every task in a fresh process, `workers` at a time, forked from a server that has imported `preload`.

    workers: tasks at once; default: one per visible GPU, else one per `threads` usable CPU cores.
    threads: OMP, MKL and OpenBLAS threads of each; without GPUs each worker is pinned to that many cores of its own.
    preload: modules imported once. One that fails to import is imported, and fails, in the worker that needs it.

    The fork server lives as long as this process: a second launcher in it finds the modules of the first.
    """

    workers: int | None = None
    threads: int = 1
    preload: Sequence[str] = ()

    def check(self) -> None:
        """Raise `UserError` for settings that cannot work."""
        for name, value in (("workers", self.workers), ("threads", self.threads)):
            if value is not None and value < 1:
                raise UserError(f"hydra.launcher.{name}={value}: must be 1 or more")

    def launch(
        self, tasks: Sequence[Task], progress: Callable[[Path], Progress], unit: Callable[[float], str]
    ) -> list[Outcome]:
        """Run `tasks`, show how they do on stderr, and return their outcomes in the same order.

        progress: work done so far in a task's folder; asked a few times a second for each running task.
        unit: that work for people to read, e.g. `1.2 TFLOP`.

        One task's failure touches no other. SIGINT, SIGTERM or SIGHUP stops: nothing starts any more, workers get
        SIGTERM and are waited for; a second signal kills them. What did not finish then is "stopped".

        Raises UserError for `workers` or `threads` below 1, or when the modules of `preload` take the server down.
        """
        self.check()
        if len({task.id for task in tasks}) < len(tasks):
            raise ValueError("two tasks have the same id")
        if not tasks:
            return []
        slots = make_slots(self.workers, self.threads, visible_gpus(), usable_cores())[: len(tasks)]
        console = console_on(sys.stderr)
        board = Board(tasks, progress)
        with _Signals() as signals, display_on(console, board, unit) as display:
            outcomes = _Launch(tasks, slots, self.threads, list(self.preload), signals, display).run()
        say(console, f"{board.summary()} in {clock(board.elapsed)}")
        if any(outcome.state == "stopped" for outcome in outcomes):
            say(console, "stopped; run the same command to continue")
        return outcomes


class _Launch:
    """One call of `LocalLauncher.launch`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        slots: Sequence[Slot],
        threads: int,
        modules: list[str],
        signals: _Signals,
        display: Display,
    ) -> None:
        self._tasks, self._threads, self._modules = tasks, threads, modules
        self._signals, self._display = signals, display
        self._waiting = deque(tasks)
        self._free = deque(slots)
        self._running: dict[int, _Running] = {}  # by sentinel
        self._outcomes: dict[str, Outcome] = {}
        self._obeyed = 0  # signals acted upon
        self._context = multiprocessing.get_context("forkserver")
        self._environ = dict(os.environ) | thread_settings(threads)
        self._server_environ = thread_settings(threads) | {
            preload.VARIABLE: json.dumps([worker.__name__, *modules]),
            # Python 3.11's fork server does not take over sys.path.
            "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path),
            # Libraries ask for GPUs when imported; through the CUDA runtime, no forked process could use them.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # Arrow's allocator would start a thread on import: a process that forks should have none.
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }

    def run(self) -> list[Outcome]:
        try:
            self._start_server()
            while self._waiting or self._running:
                self._obey()
                while self._waiting and self._free and not self._signals.received:
                    self._start(self._waiting.popleft(), self._free.popleft())
                if self._running:
                    for sentinel in connection.wait(list(self._running), timeout=BEAT):
                        self._collect(self._running.pop(cast(int, sentinel)))
                self._display.tick()
        finally:
            for running in self._running.values():
                running.worker.kill()
        return [self._outcomes.get(task.id, Outcome(task.id, "stopped", "not started", 0.0)) for task in self._tasks]

    def _start_server(self) -> None:
        """Wait until the fork server has finished its imports; a signal ends the wait."""
        if self._modules:
            self._display.say(f"importing {', '.join(self._modules)}")
        self._context.set_forkserver_preload([preload.__name__])
        try:
            with self._signals.interrupt(), _environment(self._server_environ):
                with self._signals.ignore_interrupts():  # the server inherits that
                    forkserver.ensure_running()
                with _no_main_module():
                    process = self._context.Process(target=worker.nothing)
                    process.start()
                process.join()
        except KeyboardInterrupt:
            pass
        except (EOFError, OSError) as error:
            raise UserError(
                f"the process that imports {', '.join(self._modules) or 'nothing'} for the workers died "
                f"({type(error).__name__}); hydra.launcher.preload=[] does without it"
            ) from error
        self._display.say("")

    def _obey(self) -> None:
        received = self._signals.received
        if received == self._obeyed:
            return
        self._waiting.clear()
        if received == 1 and self._running:
            self._display.say(f"stopping: {len(self._running)} running save their work first (again: kill them)")
        for running in self._running.values():
            if received == 1:
                running.worker.process.terminate()
            else:
                running.worker.kill()
        self._obeyed = received

    def _start(self, task: Task, slot: Slot) -> None:
        environ = self._environ | ({"CUDA_VISIBLE_DEVICES": slot.gpu} if slot.gpu is not None else {})
        assignment = worker.Assignment(str(task.folder), task.entry, environ, slot.cores, self._threads)
        self._display.start(task)
        attempts.begin(task.folder)
        began = time.monotonic()
        try:
            with _environment(self._server_environ), _no_main_module():
                process = Worker.start(self._context, assignment)
        except (EOFError, OSError) as error:
            self._settle(task, slot, began, "failed", f"no process could be started: {type(error).__name__}: {error}")
        else:
            self._running[process.process.sentinel] = _Running(task, slot, process, began)

    def _collect(self, running: _Running) -> None:
        state, reason = running.worker.collect(asked=self._obeyed)
        self._settle(running.task, running.slot, running.began, state, reason)

    def _settle(self, task: Task, slot: Slot, began: float, state: State, reason: str) -> None:
        outcome = Outcome(task.id, state, reason, time.monotonic() - began)
        attempts.end(task.folder, state, reason, outcome.seconds)
        self._free.append(slot)
        self._outcomes[task.id] = outcome
        self._display.end(task, outcome)
