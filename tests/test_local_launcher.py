"""The local launcher: outcomes, isolation, what workers are given, signals, and what the user sees."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from launchers import Outcome, Progress, Task
from launchers.local import SAME, LocalLauncher, Slot, make_slots, parse_gpus, usable_cores, visible_gpus
from launchers.table import Board, Lines, clock, console_on, render
from race_sweeps.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CORES = usable_cores()


def task(folder: Path, function: str, name: str | None = None) -> Task:
    name = name or function
    return Task(name, folder / name, f"tests.launcher_entries:{function}", {})


def unknown(folder: Path) -> Progress:
    return Progress(0.0, 0.0)


def launch(*tasks: Task, workers: int | None = 2, threads: int = 1) -> list[Outcome]:
    return LocalLauncher(workers=workers, threads=threads).launch(tasks, unknown, str)


def seen(folder: Path, name: str) -> Any:
    return json.loads((folder / name / "seen.json").read_text())


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


# Outcomes


def test_outcomes_in_order_and_one_failure_touches_no_other(tmp_path: Path) -> None:
    names = [
        "fail",
        "succeed",
        "user_error",
        "busy",
        "stopped",
        "exits",
        "vanish",
        "kill_itself",
        "segfault",
        "trivial",
    ]
    outcomes = launch(
        *[task(tmp_path, name) for name in names],
        Task("no_module", tmp_path / "no_module", "tests.no_such_module:run", {}),
        Task("no_function", tmp_path / "no_function", "tests.launcher_entries:no_such_function", {}),
        Task("no_colon", tmp_path / "no_colon", "nonsense", {}),
    )
    assert [(o.id, o.state, o.reason) for o in outcomes] == [
        ("fail", "failed", "ValueError: first line second line [bold] (see log.txt)"),
        ("succeed", "done", ""),
        ("user_error", "failed", "budget.flops=-1: must be positive"),
        ("busy", "busy", "another process is writing this folder"),
        ("stopped", "stopped", "saved at step 3"),
        ("exits", "failed", "SystemExit: 3 (see log.txt)"),
        ("vanish", "failed", "ended with status 0 before the task returned (see log.txt)"),
        ("kill_itself", "failed", "killed by SIGKILL (out of memory?)"),
        ("segfault", "failed", "killed by SIGSEGV (see log.txt)"),
        ("trivial", "done", ""),
        ("no_module", "failed", "ModuleNotFoundError: No module named 'tests.no_such_module' (see log.txt)"),
        (
            "no_function",
            "failed",
            "AttributeError: module 'tests.launcher_entries' has no attribute 'no_such_function' (see log.txt)",
        ),
        (
            "no_colon",
            "failed",
            "ValueError: entry point 'nonsense' is not of the form 'package.module:function' (see log.txt)",
        ),
    ]
    assert all(o.seconds > 0 for o in outcomes)
    assert seen(tmp_path, "succeed")["path"] == str(tmp_path / "succeed")
    assert 'raise ValueError("first line' in (tmp_path / "fail" / "log.txt").read_text()
    assert (tmp_path / "user_error" / "log.txt").read_text() == "error: budget.flops=-1: must be positive\n"
    assert "in segfault" in (tmp_path / "segfault" / "log.txt").read_text()
    wait_for(lambda: not alive(seen(tmp_path, "kill_itself")["child"]))  # went with its worker


def test_log_is_appended_to_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "succeed"
    folder.mkdir()
    (folder / "log.txt").write_text("earlier attempt\n")
    launch(task(tmp_path, "succeed"))
    assert (folder / "log.txt").read_text() == "earlier attempt\nprinted\ncomplained\nwritten\n"


def test_unwritable_folder_is_that_tasks_failure(tmp_path: Path) -> None:
    (tmp_path / "trivial").write_text("a file where the folder should be")
    outcomes = launch(task(tmp_path, "trivial"), task(tmp_path, "succeed"))
    assert [o.state for o in outcomes] == ["failed", "done"]
    assert outcomes[0].reason.startswith("cannot write the log: FileExistsError")


def test_what_the_user_got_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hydra.launcher.workers=0: must be 1 or more"):
        launch(task(tmp_path, "trivial"), workers=0)
    with pytest.raises(UserError, match=r"hydra.launcher.threads=-1: must be 1 or more"):
        launch(task(tmp_path, "trivial"), threads=-1)
    with pytest.raises(ValueError, match="same id"):
        launch(task(tmp_path, "trivial"), task(tmp_path, "trivial"))
    assert launch() == []


def test_broken_progress_does_not_end_the_launch(tmp_path: Path) -> None:
    def broken(folder: Path) -> Progress:
        raise OSError("no such file")

    assert [o.state for o in LocalLauncher(workers=1).launch([task(tmp_path, "trivial")], broken, str)] == ["done"]


# What a worker is given


def test_environment_pinning_and_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_TEST", "set after the fork server may have started")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tasks = [task(tmp_path, "environment", f"w{i}") for i in range(len(CORES))]
    assert {o.state for o in launch(*tasks, workers=None)} == {"done"}
    found = [seen(tmp_path, t.id) for t in tasks]
    assert sorted(core for f in found for core in f["cores"]) == CORES
    assert all(len(f["cores"]) == 1 for f in found)
    for f in found:
        environ = f["environ"]
        assert {environ[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}
        assert environ["TOKENIZERS_PARALLELISM"] == "false"
        assert environ["LAUNCHER_TEST"] == "set after the fork server may have started"
        assert environ.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
        assert not [name for name in environ if name.startswith("LAUNCHERS_")]
        assert f["sigint"]
        assert f["sigterm"]
        assert f["leader"]
        assert f["server_session"] == f["server"], "the fork server left the terminal's session"
        assert f["server_threads"] == 1
        assert "rich" not in f["modules"]
        assert f["main"] is None


def test_each_worker_has_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5e")
    launch(task(tmp_path, "environment", "a"), task(tmp_path, "environment", "b"), workers=None)
    assert [seen(tmp_path, n)["environ"]["CUDA_VISIBLE_DEVICES"] for n in ("a", "b")] == ["3", "GPU-5e"]
    assert [seen(tmp_path, n)["cores"] for n in ("a", "b")] == [CORES, CORES]


def test_gpus_are_found_without_loading_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in {"": [], "-1": [], "0": ["0"], "1, 2": ["1", "2"], "0,-1,1": ["0"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert visible_gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert visible_gpus() == ["0", "1"]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert visible_gpus() == []


def test_mig_slices_stand_for_their_gpu() -> None:
    listing = """\
        GPU 0: NVIDIA H200 (UUID: GPU-a)
          MIG 1g.18gb     Device  0: (UUID: MIG-b)
          MIG 1g.18gb     Device  1: (UUID: MIG-c)
        GPU 1: NVIDIA H200 (UUID: GPU-d)
    """
    assert parse_gpus(textwrap.dedent(listing)) == ["MIG-b", "MIG-c", "1"]


@settings(deadline=None)
@given(
    st.none() | st.integers(1, 80),
    st.integers(1, 8),
    st.lists(st.integers(0, 200), min_size=1, max_size=64, unique=True),
)
def test_pinned_workers_share_no_core(workers: int | None, threads: int, cores: list[int]) -> None:
    slots = make_slots(workers, threads, [], cores)
    assert len(slots) == (workers or max(1, len(cores) // threads))
    pinned = [slot.cores for slot in slots if slot.cores is not None]
    if len(slots) * threads <= len(cores):
        assert len(pinned) == len(slots)
        assert {len(p) for p in pinned} == {threads}
        assert len(frozenset[int]().union(*pinned)) == len(slots) * threads
        assert frozenset[int]().union(*pinned) <= set(cores)
    else:
        assert not pinned


def test_more_workers_than_gpus_share_them() -> None:
    assert make_slots(3, 1, ["0", "1"], [0]) == [Slot(gpu="0"), Slot(gpu="1"), Slot(gpu="0")]
    assert make_slots(None, 1, ["0", "1"], [0]) == [Slot(gpu="0"), Slot(gpu="1")]


# A parent process of its own

PARENT = """\
import json, sys
from pathlib import Path
from launchers import Progress, Task
from launchers.local import LocalLauncher

with open("mains", "a") as file:
    print(__name__, file=file)
entries, workers, preload = json.loads(sys.argv[1])
tasks = [Task(f"t{i}", Path(f"t{i}"), f"tests.launcher_entries:{entry}", {"n": str(i)})
         for i, entry in enumerate(entries)]
launcher = LocalLauncher(workers=workers, preload=preload)
outcomes = launcher.launch(tasks, lambda folder: Progress(1.0, 4.0, "half way"), lambda x: f"{x:.0f} TFLOP")
Path("outcomes.json").write_text(json.dumps([[o.id, o.state, o.reason] for o in outcomes]))
"""


@contextmanager
def parent(
    folder: Path,
    entries: list[str],
    workers: int = 2,
    preload: list[str] | None = None,
    how: str = "script",
    **options: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """A main program, without a `__name__` guard, that launches `entries` in `folder`."""
    script = folder / "main.py"
    script.write_text(PARENT)
    command = [str(script)]
    if how == "package":
        (folder / "program").mkdir()
        script.rename(folder / "program" / "__main__.py")
        command = ["-m", "program"]
    environ = dict(os.environ) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "LINES": "20", "COLUMNS": "100"}
    options.setdefault("stderr", (folder / "stderr").open("wb"))
    process = subprocess.Popen(
        [sys.executable, *command, json.dumps([entries, workers, preload or []])],
        cwd=folder,
        env=environ,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def outcomes_of(folder: Path) -> Any:
    return json.loads((folder / "outcomes.json").read_text())


def says(folder: Path, text: str) -> bool:
    return text in (folder / "stderr").read_text()


@pytest.mark.parametrize("how", ["script", "package"])
def test_the_main_program_is_not_run_again_in_workers(tmp_path: Path, how: str) -> None:
    with parent(tmp_path, ["trivial", "trivial", "fail"], how=how) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "mains").read_text() == "__main__\n"
    assert [state for _, state, _ in outcomes_of(tmp_path)] == ["done", "done", "failed"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to", ["parent", "group", "group twice", "everyone"])
@pytest.mark.slow
def test_first_signal_lets_workers_save(tmp_path: Path, signum: int, to: str) -> None:
    """A terminal signals the group, `timeout` the group and the parent again, SLURM every process there is."""
    with parent(tmp_path, ["patient"] * 3) as process:
        wait_for(lambda: all((tmp_path / f"t{i}" / "seen.json").exists() for i in (0, 1)))
        if to == "everyone" and signum == signal.SIGTERM:
            for pid in {seen(tmp_path, f"t{i}")[name] for i in (0, 1) for name in ("pid", "ppid")}:
                os.kill(pid, signum)
        if to != "parent":
            os.killpg(process.pid, signum)
        if to in ("parent", "group twice"):
            os.kill(process.pid, signum)
        assert process.wait(30) == 0
    assert outcomes_of(tmp_path) == [
        ["t0", "stopped", "saved"],
        ["t1", "stopped", "saved"],
        ["t2", "stopped", "not started"],
    ]
    told = "2" if to == "everyone" and signum == signal.SIGTERM else "1"
    assert [(tmp_path / f"t{i}" / "checkpoint").read_text() for i in (0, 1)] == [told, told]
    assert not (tmp_path / "t2").exists()
    assert (tmp_path / "stderr").read_text().endswith("stopped; run the same command to continue\n")


@pytest.mark.slow
def test_second_signal_kills(tmp_path: Path) -> None:
    with parent(tmp_path, ["stubborn", "stubborn", "trivial"]) as process:
        wait_for(lambda: all((tmp_path / f"t{i}" / "seen.json").exists() for i in (0, 1)))
        os.kill(process.pid, signal.SIGINT)
        wait_for(lambda: says(tmp_path, "stopping: 2 running save their work first (again: kill them)"))
        found = [seen(tmp_path, f"t{i}") for i in (0, 1)]
        time.sleep(2 * SAME)
        assert all(alive(f["pid"]) for f in found)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
    assert outcomes_of(tmp_path) == [
        ["t0", "stopped", "killed"],
        ["t1", "stopped", "killed"],
        ["t2", "stopped", "not started"],
    ]
    wait_for(lambda: not any(alive(f[name]) for f in found for name in ("pid", "child", "ppid")))


@pytest.mark.slow
def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    with parent(tmp_path, ["stubborn", "stubborn"]) as process:
        wait_for(lambda: all((tmp_path / f"t{i}" / "seen.json").exists() for i in (0, 1)))
        found = [seen(tmp_path, f"t{i}") for i in (0, 1)]
        assert all(alive(f[name]) for f in found for name in ("pid", "child", "ppid"))
        process.kill()
        process.wait()
        wait_for(lambda: not any(alive(f[name]) for f in found for name in ("pid", "child", "ppid")))


def test_signal_during_imports_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import os, time\nparent = os.getppid()\nopen('importing', 'w').close()\n"
        "while os.getppid() == parent:\n    time.sleep(0.05)\n"
    )
    with parent(tmp_path, ["trivial"], preload=["slow_module"]) as process:
        wait_for(lambda: (tmp_path / "importing").exists())
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
    assert outcomes_of(tmp_path) == [["t0", "stopped", "not started"]]
    importing, summary, last = (tmp_path / "stderr").read_text().splitlines()
    assert importing == "importing slow_module"
    assert summary.startswith("1 pending in 0:")
    assert last == "stopped; run the same command to continue"


def test_preload_is_imported_once_and_its_errors_spare_the_rest(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("print('chatter')\nopen('count', 'a').write('x')\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')\n")
    with parent(
        tmp_path, ["environment"] * 3, preload=["broken", "absent", "noisy"], stdout=subprocess.PIPE
    ) as process:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert (tmp_path / "count").read_text() == "x"
    assert [state for _, state, _ in outcomes_of(tmp_path)] == ["done"] * 3
    assert all("noisy" in seen(tmp_path, f"t{i}")["modules"] for i in range(3))
    assert printed == b""


def test_preload_that_takes_its_process_down_is_named(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(1)\n")
    with parent(tmp_path, ["trivial"], preload=["deadly"]) as process:
        assert process.wait(60) == 1
    assert says(tmp_path, "the process that imports deadly for the workers died")
    assert says(tmp_path, "hydra.launcher.preload=[]")


@pytest.mark.slow
def test_torch_trains_in_a_worker_forked_after_its_import(tmp_path: Path) -> None:
    with parent(tmp_path, ["train", "train", "environment"], preload=["torch"]) as process:
        assert process.wait(120) == 0
    assert [o[1:] for o in outcomes_of(tmp_path)] == [["done", ""]] * 3
    first, second = (seen(tmp_path, f"t{i}") for i in (0, 1))
    assert first["threads"] == 1
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    found = seen(tmp_path, "t2")
    assert "torch" in found["modules"]
    assert found["server_threads"] == 1, "a process that forks must have no other thread"


def test_the_sweep_outlives_whoever_reads_its_messages(tmp_path: Path) -> None:
    with parent(tmp_path, ["trivial"] * 4, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        process.wait(60)
    assert [state for _, state, _ in outcomes_of(tmp_path)] == ["done"] * 4


def test_live_table_on_a_terminal(tmp_path: Path) -> None:
    master, slave = os.openpty()
    with parent(tmp_path, ["environment", "fail", "environment"], stderr=slave) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                output += os.read(master, 65536)
            except OSError:  # Linux's end of a terminal
                break
        assert process.wait(60) == 0
    os.close(master)
    text = output.decode()
    assert re.search(
        r"failed t1 after \d:\d\d: ValueError: first line second line \[bold\] \(see log.txt\) in t1", text
    )
    assert "1 TFLOP of 4 TFLOP" in text
    assert "half way" in text
    assert "2 done, 1 failed in " in text
    assert "Traceback" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden once and shown again"


@pytest.mark.slow
def test_many_trivial_tasks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = [task(tmp_path, "trivial", str(i)) for i in range(300)]
    began = time.monotonic()
    outcomes = launch(*tasks)
    rate = len(tasks) / (time.monotonic() - began)
    assert [o.id for o in outcomes] == [t.id for t in tasks]
    assert {o.state for o in outcomes} == {"done"}
    with capfd.disabled():
        print(f"\n{rate:.0f} trivial tasks a second", file=sys.stderr)


# What the user sees


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def board(
    count: int, progress: Callable[[Path], Progress] = unknown, label: dict[str, str] | None = None
) -> tuple[Board, Clock]:
    now = Clock()
    tasks = [Task(f"p{i:04}", Path(f"p{i:04}"), "m:f", {"model": "tiny-s", "seed": str(i)}) for i in range(count)]
    return Board(tasks, progress, now), now


def lines_of(board: Board, width: int, height: int, message: str = "") -> list[str]:
    console = Console(width=width, height=height, record=True, file=io.StringIO(), force_terminal=True)
    console.print(render(board, lambda x: f"{x:.1f} TFLOP", width, height, message))
    return console.export_text().splitlines()


@settings(deadline=None, max_examples=50)
@given(
    running=st.integers(0, 120),
    width=st.integers(20, 200),
    height=st.integers(4, 60),
    message=st.sampled_from(["", "stopping: waiting for 5 to save their work " * 4]),
)
def test_table_stays_within_the_terminal(running: int, width: int, height: int, message: str) -> None:
    shown, _ = board(1000, lambda folder: Progress(1.0, 2.0, "rho .55\nreward .31 [bold] " * 3))
    for task in shown.tasks[:running]:
        shown.start(task)
    lines = lines_of(shown, width, height, message)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)


def test_table_of_a_large_grid() -> None:
    asked: list[str] = []

    def progress(folder: Path) -> Progress:
        asked.append(folder.name)
        return Progress(0.5, 2.0, "rho .55")

    shown, now = board(1000, progress)
    for task in shown.tasks[:64]:
        shown.start(task)
    for task in shown.tasks[:4]:
        shown.end(Outcome(task.id, "done", "", 1.0))
    asked.clear()
    now.now = 61.0
    shown.refresh()
    assert asked == [t.id for t in shown.tasks[4:64]], "only running tasks are asked"
    lines = lines_of(shown, 120, 40)
    assert len(lines) == 39
    assert "4 done, 60 running, 936 pending; elapsed 1:01" in lines[0]
    assert lines[1].strip() == "model tiny-s"  # what all share is said once
    assert lines[2].split() == ["point", "seed", "spent", "time"]
    assert lines[3].split()[:2] == ["p0004", "4"]
    assert "0.5 TFLOP of 2.0 TFLOP" in lines[3]
    assert "rho .55" in lines[3]
    assert lines[3].rstrip().endswith("1:01")
    assert lines[-1] == "and 25 more running" + " " * (len(lines[-1]) - len("and 25 more running"))


def test_narrow_table_keeps_values_whole() -> None:
    shown, _ = board(2, lambda folder: Progress(1.0, 2.0, "rho .55 reward .31"))
    for task in shown.tasks:
        shown.start(task)
    assert lines_of(shown, 60, 24)[2:] == [
        "point seed                  spent                    time",
        "p0000 0    1.0 TFLOP of 2.0 TFLOP rho .55 reward .31 0:00",
        "p0001 1    1.0 TFLOP of 2.0 TFLOP rho .55 reward .31 0:00",
    ]


def test_time_left_follows_work_done_in_this_launch() -> None:
    at = {"p0000": Progress(0.0, 100.0), "p0001": Progress(50.0, 100.0)}  # p0001 was begun in an earlier launch
    shown, now = board(4, lambda folder: at[folder.name])
    assert shown.eta() is None
    for task in shown.tasks[:2]:
        shown.start(task)
    now.now = 10.0
    assert shown.eta() is None, "nothing done yet"
    at |= {"p0000": Progress(20.0, 100.0), "p0001": Progress(70.0, 100.0)}
    shown.refresh()
    # 40 in 20 worker-seconds; left: 80 + 30 + 2 x 100, by two workers
    assert shown.eta() == pytest.approx((80 + 30 + 200) / 2.0 / 2)
    assert shown.timing() == "elapsed 0:10, about 1:17 left"
    at["p0001"] = Progress(100.0, 100.0)
    shown.end(Outcome("p0001", "done", "", 10.0))
    # 70 in 20 worker-seconds; left: 80 + 2 x 100, by the one that runs
    assert shown.eta() == pytest.approx(280 / 3.5)


def test_time_left_is_at_least_that_of_the_longest_task() -> None:
    at = {"p0000": Progress(0.0, 1000.0), "p0001": Progress(0.0, 10.0)}
    shown, now = board(2, lambda folder: at[folder.name])
    for task in shown.tasks:
        shown.start(task)
    now.now = 10.0
    at |= {"p0000": Progress(5.0, 1000.0), "p0001": Progress(5.0, 10.0)}
    shown.refresh()
    assert shown.eta() == pytest.approx(995 / 0.5)


def test_time_left_without_progress_counts_tasks() -> None:
    shown, now = board(5)
    shown.start(shown.tasks[0])
    now.now = 4.0
    assert shown.eta() is None
    shown.end(Outcome("p0000", "done", "", 4.0))
    shown.start(shown.tasks[1])
    now.now = 5.0
    assert shown.eta() == pytest.approx(3 + 3 * 4)


def test_lines_for_a_log() -> None:
    at = Progress(0.0, 4.0)
    shown, now = board(3, lambda folder: at)
    stream = io.StringIO()
    with Lines(shown, lambda x: f"{x:g} TFLOP", console_on(stream)) as display:
        display.say("importing torch")
        display.say("")
        display.start(shown.tasks[0])
        display.tick()
        now.now = 29.0
        display.tick()
        at = Progress(1.0, 4.0)
        now.now = 30.0
        display.tick()
        display.tick()
        display.end(shown.tasks[0], Outcome("p0000", "failed", "ValueError: [red] " + "x" * 100, 30.0))
        display.start(shown.tasks[1])
        display.end(shown.tasks[1], Outcome("p0001", "done", "", 0.0))
    assert stream.getvalue().splitlines() == [
        "importing torch",
        "start p0000 model tiny-s, seed 0",
        "1 running, 2 pending; running: 1 TFLOP of 4 TFLOP; elapsed 0:30, about 5:30 left",
        f"failed p0000 after 0:30: ValueError: [red] {'x' * 100} in p0000",
        "start p0001 model tiny-s, seed 1",
        "done p0001 after 0:00",
    ]
    assert shown.summary() == "1 done, 1 failed, 1 pending"


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.9, 60, 3599, 3600, 90061)] == [
        "0:00",
        "0:59",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]
