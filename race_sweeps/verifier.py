"""math-verify behind worker processes: whatever a completion does to it costs that completion, not the run.

A small server process (a fresh interpreter without torch, started when first needed) imports math-verify once. For
each batch it forks its workers, which so share the batch and the imported library and are gone when the batch is done:
nothing leaks from one to the next, and a worker that dies is replaced in milliseconds. Each item runs under kernel
limits that no stuck C code can ignore: CPU time (and several times that in wall-clock time, in case it sleeps), after
which a signal ends the worker, and address space. The server ends when its owner's end of the pipe closes, however
that happened.

    python -m benchmarks.verifier    throughput against a serial loop, and hostile text
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import IO

from race_sweeps import answers

CPU_SECONDS = 3.0
MEMORY = 2**30
WALL = 10  # wall-clock limit, in CPU limits: machines are shared
CHUNK = 8192  # items a batch: their indices must fit in a pipe (64 KiB on Linux)
_LENGTH, _INDEX, _REPORT = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<IB")

Item = tuple[str, str, str]
"""("answer", completion, reference) or ("equation", left side, right side)."""


class Outcome(IntEnum):
    """What became of an item. UNDECIDED: an equation with unknowns, or no mathematics."""

    WRONG = 0
    RIGHT = 1
    UNDECIDED = 2
    TIMEOUT = 3
    CRASH = 4


_STARTED = 255


@dataclass(frozen=True)
class Checked:
    """Outcomes in the order of the items; `counts` for the run's metrics, nothing where nothing happened."""

    outcomes: list[Outcome]
    counts: dict[str, int] = field(default_factory=dict)


class Verifier:
    """A pool of checking processes, started at the first `check`. `workers`: as many as the process may use CPUs;
    `seconds`: CPU time per item; `memory`: bytes per worker beyond what the library takes."""

    def __init__(self, workers: int | None = None, seconds: float = CPU_SECONDS, memory: int = MEMORY) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self.seconds, self.memory = seconds, memory
        self._server: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def check(self, items: Sequence[Item]) -> Checked:
        """Check items; equal ones once. Never raises for what is in them."""
        distinct = list(dict.fromkeys(items))
        with self._lock:
            known: dict[Item, Outcome] = {}
            for start in range(0, len(distinct), CHUNK):
                chunk = distinct[start : start + CHUNK]
                known.update(zip(chunk, self._ask(chunk), strict=True))
        outcomes = [known[item] for item in items]
        found = Counter(outcomes)
        counts = {"verifier/timeouts": found[Outcome.TIMEOUT], "verifier/crashes": found[Outcome.CRASH]}
        return Checked(outcomes, {name: n for name, n in counts.items() if n})

    def close(self) -> None:
        """End the server and its workers."""
        server, self._server = self._server, None
        if server is not None and self._owner == os.getpid():
            for stream in (server.stdin, server.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            server.kill()
            server.wait()

    def _ask(self, items: list[Item]) -> list[Outcome]:
        for _ in range(2):  # a server that dies (killed for memory, say) is replaced once
            try:
                return self._exchange(items)
            except (EOFError, OSError):
                self.close()
            except BaseException:  # interrupted in the middle of an exchange
                self.close()
                raise
        return [Outcome.CRASH] * len(items)

    def _exchange(self, items: list[Item]) -> list[Outcome]:
        server = self._running()
        assert server.stdin is not None
        assert server.stdout is not None
        request = {"items": items, "workers": self.workers, "seconds": self.seconds, "memory": self.memory}
        body = json.dumps(request).encode("ascii")  # escapes lone surrogates, which no other encoding takes
        server.stdin.write(_LENGTH.pack(len(body)))
        server.stdin.write(body)
        server.stdin.flush()
        return [Outcome(code) for code in _read(server.stdout, len(items))]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # inherited through a fork: the server belongs to the parent
            self._server, self._owner = None, os.getpid()
        if self._server is None:
            start = f"import sys; sys.path[:] = {sys.path!r}; from race_sweeps.verifier import serve; sys.exit(serve())"
            self._server = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the owner's business
                env={**os.environ, "PYTHONHASHSEED": "0"},  # verdicts do not depend on the order of a set
            )
            atexit.register(self.close)
        return self._server


@cache
def shared(seconds: float = CPU_SECONDS, memory: int = MEMORY) -> Verifier:
    """The process's own verifier for these limits."""
    return Verifier(seconds=seconds, memory=memory)


def correct(
    completions: Sequence[str], references: Sequence[str], style: str, verifier: Verifier | None = None
) -> tuple[list[bool], dict[str, int]]:
    """Whether each completion's final answer equals its reference, with the verifier's counts. Plain cases are decided
    here; without others no process is started. A time-out or crash is a wrong answer."""
    decided = [answers.decide(c, r, style) for c, r in zip(completions, references, strict=True)]
    open_ = [i for i, known in enumerate(decided) if known is None]
    if not open_:
        return [bool(known) for known in decided], {}
    items: list[Item] = [("answer", _marked(completions[i], style), references[i]) for i in open_]
    checked = (verifier or shared()).check(items)
    for i, outcome in zip(open_, checked.outcomes, strict=True):
        decided[i] = outcome is Outcome.RIGHT
    return [bool(known) for known in decided], checked.counts


def _marked(completion: str, style: str) -> str:
    if style == "equals":
        return f"${answers.final(completion, style)}$"
    boxes = answers.boxed(completion)
    return " and ".join(f"\\boxed{{{box}}}" for box in boxes) if boxes else completion


# --- the server process -----------------------------------------------------------------------------------------------


def serve() -> int:
    """Answer batches on standard input until it closes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the owner may still be scoring its last batch
    _warm_up()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # what the library prints about hostile text
        os.dup2(null, fd)
    gc.collect()
    gc.freeze()
    try:
        while True:
            (size,) = _LENGTH.unpack(_read(requests, _LENGTH.size))
            request = json.loads(_read(requests, size))
            replies.write(_run(**request))
            replies.flush()
    except (EOFError, BrokenPipeError):
        return 0


def _warm_up() -> None:
    """Import the library and fill its parser's tables before anything is forked."""
    answers.equal(r"so $x = \boxed{\left(\frac{1}{2}, \sqrt{3}\right)}$", r"(\frac12, 3^{1/2})")
    answers.equal(r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}")
    answers.equal(r"\boxed{(-\infty, 2] \cup \{x^2 + 2x\}}", r"(-\infty, 2)")
    answers.equal("The answer is 3/4 or $12.50", "12.5")
    answers.holds("2 * 3 + 4^2", "22")


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _run(items: list[Item], workers: int, seconds: float, memory: int) -> bytes:
    """One outcome (a byte) per item, in order."""
    outcomes = bytearray([Outcome.CRASH]) * len(items)
    queue, fill = os.pipe()
    os.write(fill, b"".join(_INDEX.pack(i) for i in range(len(items))))
    os.close(fill)
    doing: dict[int, int] = {}  # by a worker's report pipe: the item it is at

    with selectors.DefaultSelector() as reports:

        def start() -> None:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                _work(items, queue, write, seconds, memory)
            os.close(write)
            reports.register(read, selectors.EVENT_READ, pid)

        for _ in range(min(workers, len(items))):
            start()
        while reports.get_map():
            for key, _ in reports.select():
                if report := os.read(key.fd, _REPORT.size):
                    index, code = _REPORT.unpack(report)
                    if code == _STARTED:
                        doing[key.fd] = index
                    else:
                        del doing[key.fd]
                        outcomes[index] = code
                    continue
                _, status = os.waitpid(key.data, 0)
                reports.unregister(key.fd)
                os.close(key.fd)
                if (lost := doing.pop(key.fd, None)) is not None:
                    timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
                    outcomes[lost] = Outcome.TIMEOUT if timed_out else Outcome.CRASH
                if status:
                    start()
    os.close(queue)
    return bytes(outcomes)


def _work(items: list[Item], queue: int, report: int, seconds: float, memory: int) -> None:
    """A worker: takes items from the queue until it is empty. Does not return."""
    try:
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _address_space() + memory
        with suppress(ValueError, OSError):  # not every system has it
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        checks: dict[str, Callable[[str, str], bool | None]] = {"answer": answers.equal, "equation": answers.holds}
        while taken := os.read(queue, _INDEX.size):
            (index,) = _INDEX.unpack(taken)
            kind, first, second = items[index]
            os.write(report, _REPORT.pack(index, _STARTED))
            signal.setitimer(signal.ITIMER_REAL, WALL * seconds)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            outcome = _outcome(checks[kind], first, second)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.write(report, _REPORT.pack(index, outcome))
            if outcome is Outcome.CRASH:
                os._exit(1)  # out of memory: what is left of the library cannot be relied on
        os._exit(0)
    finally:
        os._exit(1)


def _outcome(check: Callable[[str, str], bool | None], first: str, second: str) -> Outcome:
    try:
        result = check(first, second)
    except MemoryError:
        return Outcome.CRASH
    except BaseException:  # untrusted text: whatever it breaks is a wrong answer
        return Outcome.WRONG
    return Outcome.UNDECIDED if result is None else Outcome(int(result))


def _address_space() -> int:
    """Bytes mapped by this process; 0 where the system does not tell."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0
