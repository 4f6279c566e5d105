"""The verifier: right verdicts in order whatever the text does to the library, limits that hold, no process left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from race_sweeps.verifier import Item, Outcome, Verifier, correct, shared

RIGHT, WRONG, TIMEOUT, CRASH = Outcome.RIGHT, Outcome.WRONG, Outcome.TIMEOUT, Outcome.CRASH


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    pool = Verifier(workers=2, seconds=1.0)
    yield pool
    pool.close()


def answer(text: str, reference: str = "7") -> Item:
    return ("answer", text, reference)


def test_order_is_kept_and_equal_items_agree(verifier: Verifier) -> None:
    rng = random.Random(0)
    items, expected = [], []
    for _ in range(300):
        value, shown = rng.randrange(20), rng.randrange(20)
        items.append(answer(rf"\boxed{{\frac{{{2 * shown}}}{{2}}}}", str(value)))
        expected.append(RIGHT if value == shown else WRONG)
    assert verifier.check(items).outcomes == expected


KILLERS = [
    r"\boxed{5^{5^{5^{5}}}}",
    r"\boxed{100000000!}",
    r"\boxed{" + "9" * 10**6 + "}",
    r"\boxed{" + "(" * 20_000 + "1" + ")" * 20_000 + "}",
    r"\boxed{" + r"\frac{1}{" * 3000 + "1" + "}" * 3000 + "}",
    r"\boxed{" * 5000 + "1",
    "=" * 10**6,
    "7 " * 500_000,
    "\ud800\udfff \0 \\boxed{\ud800}",
    r"\boxed{\sum_{n=1}^{10^{12}} \sin(n)}",
    r"\boxed{x = \frac{1}{0} = \infty^{0}}",
    "\\",
    "",
]


def test_what_stalls_the_library_costs_that_item_only(verifier: Verifier) -> None:
    items = [item for killer in KILLERS for item in (answer(killer), answer(r"\boxed{\frac{14}{2}}"))]
    checked = verifier.check(items)
    assert checked.outcomes[1::2] == [RIGHT] * len(KILLERS)
    assert all(outcome in (WRONG, TIMEOUT, CRASH) for outcome in checked.outcomes[::2])
    assert checked.outcomes[0] is TIMEOUT
    assert checked.counts["verifier/timeouts"] == checked.outcomes.count(TIMEOUT)


def _stand_in(folder: Path) -> dict[str, str]:
    """A library that does what hostile text might make the real one do."""
    package = folder / "math_verify"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal, time, ctypes\n"
        "def verify(gold, found, timeout_seconds=None):\n"
        "    return gold == found\n"
        "def parse(text, parsing_timeout=None):\n"
        "    if 'sleep' in text: time.sleep(1e6)\n"
        "    if 'segfault' in text: ctypes.string_at(0)\n"
        "    if 'exit' in text: os._exit(0)\n"
        "    if 'hog' in text: x = bytearray(2**29)\n"
        "    if 'raise' in text: raise BaseException('hostile')\n"
        "    if 'print' in text: os.write(1, b'junk' * 100); os.write(2, b'junk')\n"
        "    if 'ignore' in text:\n"
        "        signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.signal(signal.SIGPROF, signal.SIG_DFL)\n"
        "        while True: pass\n"
        "    return text\n"
    )
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.getcwd()}"}  # noqa: PTH109


def test_each_way_to_die_is_told_apart(tmp_path: Path) -> None:
    code = (
        "from race_sweeps.verifier import Verifier\n"
        "pool = Verifier(workers=2, seconds=0.2, memory=2**28)\n"
        "words = ['ok', 'sleep', 'ok2', 'segfault', 'exit', 'hog', 'raise', 'print', 'ignore', 'ok3']\n"
        "items = [('answer', '\\\\boxed{' + w + '}', w) for w in words]\n"
        "items[0] = ('answer', '\\\\boxed{ok}', 'ok')\n"
        "print([o.name for o in pool.check(items).outcomes])\n"
        "print(pool.check(items).counts)\n"
        "print(Verifier(memory=2**30).check([('answer', '\\\\boxed{hog}', 'hog')]).outcomes[0].name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=_stand_in(tmp_path), capture_output=True, text=True, check=True
    )
    outcomes, counts, with_memory = done.stdout.splitlines()
    expected = ["RIGHT", "TIMEOUT", "RIGHT", "CRASH", "CRASH", "CRASH", "WRONG", "RIGHT", "TIMEOUT", "RIGHT"]
    assert outcomes == str(expected)
    assert counts == str({"verifier/timeouts": 2, "verifier/crashes": 3})
    assert with_memory == "RIGHT"
    assert done.stderr == ""


def test_a_killed_server_is_replaced(verifier: Verifier) -> None:
    verifier.check([answer(r"\boxed{3+4}")])
    before = verifier._server
    assert before is not None
    before.send_signal(signal.SIGKILL)
    before.wait()
    assert verifier.check([answer(r"\boxed{3+4}")]).outcomes == [RIGHT]
    assert verifier._server is not before


def test_nothing_outlives_its_owner() -> None:
    code = (
        "from race_sweeps.verifier import Verifier\n"
        "pool = Verifier(workers=2, seconds=1.0)\n"
        "pool.check([('answer', '1+1', '2')]); print(pool._server.pid, flush=True)\n"
        "pool.check([('answer', f'\\\\boxed{{5^{{5^{{5^{{{n}}}}}}}}}', '2') for n in range(5, 999)])\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    while len(workers := server.children()) < 2:
        time.sleep(0.01)
    owner.kill()  # in the middle of a batch of a thousand seconds
    owner.wait()
    _, alive = psutil.wait_procs([server, *workers], timeout=120)
    assert not alive


def test_a_fork_of_the_owner_gets_a_server_of_its_own(verifier: Verifier) -> None:
    verifier.check([answer(r"\boxed{3+4}")])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = verifier.check([answer(r"\boxed{3+4}")]).outcomes[0]
        os.write(write, bytes([outcome]))
        verifier.close()
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == bytes([RIGHT])
    os.waitpid(pid, 0)
    assert verifier.check([answer(r"\boxed{3+4}")]).outcomes == [RIGHT]


def test_works_inside_a_daemonic_process_and_a_thread() -> None:
    code = (
        "import multiprocessing, threading\n"
        "def work(queue):\n"
        "    from race_sweeps.verifier import correct\n"
        "    def in_thread(): queue.put(correct(['\\\\boxed{3+4}'], ['7'], 'math'))\n"
        "    thread = threading.Thread(target=in_thread); thread.start(); thread.join()\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('fork'); queue = context.Queue()\n"
        "    process = context.Process(target=work, args=(queue,), daemon=True); process.start()\n"
        "    print(queue.get()); process.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "([True], {})"


def test_plain_cases_start_no_process() -> None:
    shared.cache_clear()
    values, counts = correct(
        ["7+3=0", r"\boxed{18}", r"\boxed{-3}", "", "1,234"], ["0", "18", "3", "1", "1234"], "math"
    )
    assert (values[1:], counts) == ([True, False, False, True], {})
    values, counts = correct(["7+3=0*8=0-2=8", "7+3=0*8=0-2", "8=x"], ["8", "8", "8"], "equals")
    assert (values, counts) == ([True, False, False], {})


def test_equations() -> None:
    pool = shared()
    items: list[Item] = [
        ("equation", "2^{10}", "1024"),
        ("equation", r"\frac{1}{2} + \frac{1}{3}", r"\frac{5}{6}"),
        ("equation", "2^{10}", "1023"),
        ("equation", "2x", "6"),
        ("equation", "???", "6"),
    ]
    undecided = Outcome.UNDECIDED
    assert pool.check(items).outcomes == [RIGHT, RIGHT, WRONG, undecided, undecided]


@pytest.mark.slow
def test_hostile_text() -> None:
    """Generated completions, hostile parts next to sound ones: as many verdicts as items, sound ones right."""
    from benchmarks.verifier import hostile

    pool = Verifier(workers=2, seconds=0.5, memory=2**28)
    items = hostile(150, seed=1)
    try:
        checked = pool.check([item for item, _ in items])
        server = pool._server
    finally:
        pool.close()
    assert len(checked.outcomes) == len(items)
    assert all(outcome is RIGHT for outcome, (_, sound) in zip(checked.outcomes, items, strict=True) if sound)
    assert server is not None
    assert not psutil.pid_exists(server.pid)
