"""The cluster path on a real one-node SLURM, started by scripts/mini-slurm; and what needs none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launchers import Outcome, Progress, Task, attempts, cluster, jobs, states
from launchers.cli import main
from launchers.jobs import Array, Shape
from launchers.local import LocalLauncher
from launchers.slurm import SlurmLauncher
from launchers.states import PointState
from race_sweeps.errors import UserError
from race_sweeps.folder import read_rows, write_json

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "mini-slurm"
ENTRY = "tests.slurm_entries:run"


# Sweeps of behaviours


def make_tasks(sweep: Path, behaviours: Mapping[str, str], gpus: int = 0) -> list[Task]:
    """Points that do as their behaviour says, listed in the manifest. The first word is their label `kind`."""
    for name, behaviour in behaviours.items():
        folder = sweep / "points" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "behaviour").write_text(behaviour)
    rows = [{"id": name, "kind": behaviour.split()[0]} for name, behaviour in behaviours.items()]
    content = json.loads((sweep / "sweep.json").read_text()) if (sweep / "sweep.json").exists() else {}
    listed = {row["id"]: row for row in [*content.get("points", []), *rows]}
    write_json(sweep / "sweep.json", content | {"points": list(listed.values())})
    return [Task(row["id"], sweep / "points" / row["id"], ENTRY, {"kind": row["kind"]}, gpus=gpus) for row in rows]


def launch(tasks: Sequence[Task], **settings: Any) -> list[Outcome]:
    launcher = SlurmLauncher(**{"cpus_per_task": 1, "timeout_min": 5, "mem_gb": 0.5, **settings})
    return launcher.launch(tasks, lambda folder: Progress(0, 0), str)


def standings(sweep: Path) -> dict[str, PointState]:
    return {point.id: point for point in states.look(sweep)}


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.3)


def settled(sweep: Path, seconds: float = 60.0) -> dict[str, PointState]:
    """The points, once none is queued or running any more."""
    wait_for(lambda: not any(p.state in states.OPEN for p in states.look(sweep)), seconds)
    return standings(sweep)


def runs_of(sweep: Path, name: str) -> list[dict[str, Any]]:
    return list(read_rows(sweep / "points" / name / "runs.jsonl"))


def steps_of(sweep: Path, name: str) -> list[int]:
    return [row["step"] for row in read_rows(sweep / "points" / name / "ledger.jsonl")]


def result_of(sweep: Path, name: str) -> dict[str, Any]:
    content = json.loads((sweep / "points" / name / "result.json").read_text())
    assert isinstance(content, dict)
    return content


# With SLURM


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A SLURM of its own, for this module; ended with it. Gives the environment that scripts/mini-slurm needs."""
    if os.getuid() != 0:
        pytest.skip("scripts/mini-slurm needs root; run the tests in a container")
    folder = tmp_path_factory.mktemp("slurm")
    environ = os.environ | {"MINI_SLURM_DIR": str(folder), "MINI_SLURM_PORT": "27817"}
    started = subprocess.run([SCRIPT, "start"], env=environ, capture_output=True, text=True)
    patch = pytest.MonkeyPatch()
    try:
        if started.returncode:
            pytest.skip(f"no SLURM could be started: {started.stderr.strip().splitlines()[-1]}")
        patch.setenv("SLURM_CONF", str(folder / "etc" / "slurm.conf"))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield environ
    finally:
        patch.undo()
        subprocess.run([SCRIPT, "stop"], env=environ, capture_output=True, check=True)


@pytest.mark.slow
def test_each_ends_in_its_own_way_and_resume_finishes_the_sweep(
    slurm: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "mixed"
    tasks = make_tasks(
        sweep,
        {
            "quick0": "sleep 1",
            "quick1": "sleep 1",
            "quick2": "sleep 1",
            "quick3": "sleep 1",
            "broken": "fail",
            "greedy": "greedy",
            "silent": "vanish",
            "cancelled": "steps 1000",
        },
        gpus=1,
    )
    tasks += make_tasks(sweep, {"timed": "steps 250", "bounded": "endless 100000"})
    short = {"timeout_min": 1, "signal_seconds": 50}  # SLURM looks at the clock of a job twice a minute
    began = time.monotonic()
    outcomes = launch(
        tasks,
        by_label={
            "kind=steps": short,
            "kind=endless": short | {"max_requeues": 0},
            "kind=greedy": {"mem_gb": 0.3},
        },
    )
    assert time.monotonic() - began < 10
    assert {o.state for o in outcomes} == {"submitted"}
    wait_for(lambda: bool(runs_of(sweep, "cancelled")))
    assert main(["cancel", str(sweep), "cancelled"]) == 0
    wait_for(lambda: standings(sweep)["cancelled"].state != "running")
    found = settled(sweep, 200)

    assert {name for name, p in found.items() if p.state == "done"} == {
        "quick0", "quick1", "quick2", "quick3", "timed",
    }  # fmt: skip
    assert (found["bounded"].state, found["bounded"].slurm) == ("failed", "FAILED")
    assert found["bounded"].reason.startswith("time limit, but max_requeues=0 are used up; checkpointed at step ")
    assert (found["broken"].state, found["broken"].slurm) == ("failed", "FAILED")
    assert found["broken"].reason == "ValueError: this point is broken (see log.txt)"
    assert found["greedy"].state == "failed"
    assert "memory" in found["greedy"].reason
    assert (found["silent"].state, found["silent"].reason) == ("incomplete", "COMPLETED without a result")
    assert found["cancelled"].state == "cancelled", "and not put back into the queue by its own SIGTERM"
    assert len(runs_of(sweep, "cancelled")) == 1
    assert found["timed"].restarts >= 1
    assert (result_of(sweep, "timed")["steps"], len(runs_of(sweep, "timed"))) == (250, found["timed"].restarts + 1)
    assert steps_of(sweep, "timed") == list(range(1, 251)), "each attempt goes on where the one before has checkpointed"
    assert all(len(runs_of(sweep, f"quick{i}")) == 1 for i in range(4))
    at_once = [result_of(sweep, f"quick{i}") for i in range(4)]
    for a in at_once:
        for b in at_once:
            if a is not b and a["begin"] < b["end"] and b["begin"] < a["end"]:
                assert a["gpus"] != b["gpus"]
    assert {row["gpus"] for row in at_once} == {"0", "1"}

    capsys.readouterr()
    assert main(["status", str(sweep)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("mixed: 5 done, 1 cancelled, 1 incomplete, 3 failed")
    assert "COMPLETED without a result" in shown
    assert main(["logs", str(sweep), "brok"]) == 0
    assert "ValueError: this point is broken" in capsys.readouterr().out

    (sweep / "points" / "broken" / "mended").touch()
    (sweep / "points" / "bounded" / "behaviour").write_text("sleep 0")
    assert main(["retry", "--failed", str(sweep), "mem_gb=1"]) == 0
    assert {name for name, p in standings(sweep).items() if p.state != "done"} >= {"silent", "cancelled"}
    found = settled(sweep)
    assert [found[name].state for name in ("broken", "greedy", "bounded", "silent")] == [*["done"] * 3, "incomplete"]
    for name in ("silent", "cancelled"):
        (sweep / "points" / name / "behaviour").write_text("sleep 0")
    assert main(["resume", str(sweep)]) == 0
    assert {p.state for p in settled(sweep).values()} == {"done"}
    assert main(["status", str(sweep), "--json"]) == 0
    capsys.readouterr()
    assert main(["resume", str(sweep)]) == 0
    assert capsys.readouterr().out.startswith("nothing to submit")


@pytest.mark.slow
def test_a_real_sweep_lives_without_its_terminal(slurm: Mapping[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "race_sweeps", "-m", "stage=A", "model=tiny-s", "update_fraction=rho55,rho70", "seed=0",
        "budget.flops=1e10", "eval.problems=64", "sweep=real", "hydra/launcher=slurm", "hydra.launcher.gpus_per_node=1",
        "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=10",
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, start_new_session=True)
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "runs" / "real"
    assert "2 points submitted, 0 in the queue before: jobs " in done.stdout
    assert done.stdout.splitlines()[-1] == "now: python -m launchers status runs/real"
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "0 points submitted, 2 in the queue before" in again.stdout
    found = settled(sweep, 150)
    print(f"submitted and finished in {time.monotonic() - began:.1f} s")
    assert {(p.state, p.restarts) for p in found.values()} == {("done", 0)}
    assert all(p.progress.done >= 0.99 * p.progress.total == 0.99e10 for p in found.values())
    begun = [row for name in found for row in attempts.rows(sweep / "points" / name) if row["event"] == "begin"]
    assert sorted(row["gpus"] for row in begun) == ["0", "1"]


@pytest.mark.slow
def test_preempted_by_a_partition_that_comes_first(slurm: Mapping[str, str], tmp_path: Path) -> None:
    sweep = tmp_path / "preempted"
    tasks = make_tasks(sweep, {"victim": "steps 40"}, gpus=2)
    launch(tasks, max_requeues=1)
    wait_for(lambda: bool(runs_of(sweep, "victim")))
    subprocess.run(["srun", "-p", "urgent", "--gres=gpu:1", "-t1", "sleep", "1"], check=True, timeout=60)
    found = settled(sweep)["victim"]
    assert (found.state, found.restarts) == ("done", 1)
    ends = [row for row in attempts.rows(sweep / "points" / "victim") if row["event"] == "end"]
    assert ends[0]["reason"].startswith("preempted; back in the queue (1 of 1); checkpointed at step ")
    assert steps_of(sweep, "victim") == list(range(1, 41))


@pytest.mark.slow
def test_two_launches_at_once_run_no_point_twice(
    slurm: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "max_array_size", lambda: 3)
    sweep = tmp_path / "twice"
    tasks = make_tasks(sweep, {f"p{i}": "sleep 1" for i in range(10)})
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(launch, [tasks[:7], tasks[3:]])
    assert [o.state for o in (*first, *second)] == ["submitted"] * 14
    jobs_of = {o.id: {p.job for p in (*first, *second) if p.id == o.id} for o in (*first, *second)}
    assert all(len(found) == 1 for found in jobs_of.values())
    arrays = jobs.load(sweep)
    assert sorted(len(array.points) for array in arrays) in ([1, 3, 3, 3], [1, 3, 3, 3][::-1])
    assert sorted(point for array in arrays for point in array.points) == [f"p{i}" for i in range(10)]
    assert {p.state for p in settled(sweep).values()} == {"done"}
    assert all(len(runs_of(sweep, f"p{i}")) == 1 for i in range(10))
    assert {o.state for o in launch(tasks)} == {"done"}


@pytest.mark.slow
def test_daemon_and_job_killed_hard(slurm: Mapping[str, str], tmp_path: Path) -> None:
    sweep = tmp_path / "killed"
    launch(make_tasks(sweep, {"untouched": "steps 40", "killed": "steps 40"}))
    wait_for(lambda: all((sweep / "points" / name / "checkpoint").exists() for name in ("untouched", "killed")))
    os.kill(int((Path(slurm["MINI_SLURM_DIR"]) / "run" / "slurmd.pid").read_text()), signal.SIGKILL)
    os.kill(attempts.rows(sweep / "points" / "killed")[0]["pid"], signal.SIGKILL)
    subprocess.run([SCRIPT, "start"], env=slurm, capture_output=True, check=True)
    found = settled(sweep)
    assert (found["untouched"].state, len(runs_of(sweep, "untouched"))) == ("done", 1)
    assert found["killed"].state == "failed"
    assert "Killed" in found["killed"].reason
    assert main(["resume", str(sweep)]) == 0
    assert {p.state for p in settled(sweep).values()} == {"done"}
    steps = steps_of(sweep, "killed")
    assert sorted(set(steps)) == list(range(1, 41))
    assert steps.count(1) == 1, "it went on from the newest checkpoint, not from nothing"
    assert len(steps) - 40 <= 10, "and repeated what came after that only"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_no_job(slurm: Mapping[str, str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        tasks = make_tasks(disk / "sweep", {"a": "sleep 0", "b": "sleep 0"})
        with pytest.raises(UserError, match=r"/\.slurm.*: No space left on device$"):
            launch(tasks)
        (array,) = jobs.load(disk / "sweep")
        assert (array.job, cluster.named([array.name])) == (None, {})
        assert {p.state for p in states.look(disk / "sweep")} <= {"failed", "lost"}
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_what_slurm_refuses_leaves_a_trace(
    slurm: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "refused"
    tasks = make_tasks(sweep, {"a": "sleep 0", "b": "sleep 0"})
    with pytest.raises(UserError, match=r"partition=nowhere: .*; valid: main, urgent$"):
        launch(tasks, partition="nowhere")
    assert {(p.state, p.job) for p in states.look(sweep)} == {("failed", "")}
    (array,) = jobs.load(sweep)
    assert array.error is not None
    assert "partition" in array.error
    with pytest.raises(UserError, match=r"SLURM: .*; asked for constraint=moon, "):
        launch(tasks, constraint="moon")
    assert main(["resume", str(sweep), "constraint=null", "partition=urgent"]) == 0
    assert {p.state for p in settled(sweep).values()} == {"done"}
    captured = capsys.readouterr()
    assert captured.out.startswith("2 points in the queue, as job ")
    assert captured.err == ""


@pytest.mark.slow
def test_a_submission_cut_short_is_found_by_its_name(slurm: Mapping[str, str], tmp_path: Path) -> None:
    sweep = tmp_path / "cut"
    make_tasks(sweep, {"a": "sleep 0", "b": "sleep 0"})
    array = Array.new("cut", ENTRY, Shape(), ["a", "b"])
    jobs.write(sweep, array)
    assert {p.state for p in states.look(sweep)} == {"lost"}
    subprocess.run(
        ["sbatch", f"--job-name={array.name}", "--array=0-1", "--hold", "--wrap=true"],
        check=True, capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    assert {p.state for p in states.look(sweep)} == {"queued"}
    assert main(["cancel", str(sweep), "a"]) == 0
    assert [p.state for p in states.look(sweep)] == ["cancelled", "queued"]
    assert main(["cancel", str(sweep)]) == 0
    assert {p.state for p in states.look(sweep)} == {"cancelled"}


@pytest.mark.slow
def test_without_accounting_the_folders_tell(
    slurm: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "forgotten"
    launch(make_tasks(sweep, {"good": "sleep 0", "bad": "fail", "silent": "vanish", "held": "sleep 0"}))
    settled(sweep)
    for name in ("queue", "accounts"):  # as if it were hours later
        monkeypatch.setattr(cluster, name, lambda jobs: list(jobs) and {})
    (sweep / "points" / "held" / "result.json").unlink()
    (sweep / "points" / "held" / attempts.NAME).unlink()
    found = {name: (p.state, p.reason) for name, p in standings(sweep).items()}
    assert found["good"] == ("done", "")
    assert found["bad"] == ("failed", "ValueError: this point is broken (see log.txt)")
    assert found["silent"] == ("incomplete", "ended without a result")
    assert found["held"][0] == "lost"


# Without SLURM


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_no_slurm_on_the_machine(nothing_installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "race_sweeps", "model=tiny-s", "hydra/launcher=slurm", f"runs_dir={tmp_path}/runs"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("race_sweeps: SLURM: no sbatch on this machine")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_local_sweep_has_a_status_too(
    nothing_installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "here"
    tasks = make_tasks(sweep, {"good": "sleep 0", "bad": "fail", "waiting": "sleep 0"})
    LocalLauncher(workers=1).launch(tasks[:2], lambda folder: Progress(0, 0), str)
    capsys.readouterr()
    assert main(["status", str(sweep)]) == 1
    assert capsys.readouterr().out.startswith("here: 1 done, 1 pending, 1 failed\n")
    assert main(["status", str(sweep), "--json"]) == 1
    rows = {row["point"]: (row["state"], row["reason"]) for row in json.loads(capsys.readouterr().out)}
    assert rows == {
        "good": ("done", ""),
        "bad": ("failed", "ValueError: this point is broken (see log.txt)"),
        "waiting": ("pending", ""),
    }
    assert main(["resume", str(sweep)]) == 2
    attempts.begin(sweep / "points" / "waiting")
    assert standings(sweep)["waiting"].state == "running"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status", "absent"], "'absent' is not a sweep"),
        (["stats", "here"], "command 'stats': did you mean 'status'?"),
        (["status"], "the following arguments are required: SWEEP"),
        (["logs", "here", "goof"], "'goof' is no point of this sweep; did you mean 'good'?"),
        (["logs", "here", "goo"], "log.txt: nothing there; good is pending"),
        (["logs", "here", ""], "'' begins the ids of 2 points: good, gone"),
    ],
)
def test_mistakes_give_one_line_and_status_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tasks(tmp_path / "here", {"good": "sleep 0", "gone": "sleep 0"})
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("launchers: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_no_permission_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "require", lambda: None)
    tasks = make_tasks(tmp_path / "sweep", {"a": "sleep 0"})
    (tmp_path / "sweep" / ".slurm").touch()
    with pytest.raises(UserError, match=r"\.slurm: File exists; choose another runs_dir"):
        launch(tasks)
    (tmp_path / "sweep" / ".slurm").unlink()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        launch(tasks)


def test_shapes_follow_plan_and_label(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SlurmLauncher(by_label={"model=7b": {"mem_gb": 96, "gpus_per_node": 2}}, max_timeout_min=600)

    def shape(model: str, hours: float | None, gpus: int = 1) -> Shape:
        return launcher.shape(Task("p", Path("p"), ENTRY, {"model": model}, gpus=gpus, hours=hours))

    assert (shape("3b", 1.0).mem_gb, shape("3b", 1.0).gpus_per_node, shape("3b", 1.0).timeout_min) == (None, 1, 120)
    assert (shape("7b", 1.0).mem_gb, shape("7b", 1.0).gpus_per_node) == (96, 2)
    assert [shape("3b", hours).timeout_min for hours in (0.01, 0.5, 100.0, None)] == [15, 60, 600, 600]
    assert SlurmLauncher(timeout_min=7).shape(Task("p", Path("p"), ENTRY, {}, hours=9.0)).timeout_min == 7


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cpus_per_task": 0}, "hydra.launcher.cpus_per_task=0: must be a positive number"),
        ({"timeout_min": 2, "signal_seconds": 120}, "the warning must come within the time limit of 2 min"),
        ({"by_label": {"7b": {}}}, "hydra.launcher.by_label.7b: write a label and its settings"),
        ({"by_label": {"model=7b": {"memgb": 1}}}, "hydra.launcher.by_label.model=7b: memgb: did you mean 'mem_gb'?"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        SlurmLauncher(**settings).check()
    assert says in str(error.value)


def test_ids_of_elements_that_have_not_begun() -> None:
    assert cluster.expand("12_[0-2,7%4]") == ["12_0", "12_1", "12_2", "12_7"]
    assert cluster.expand("12_[3]") == ["12_3"]
    assert [cluster.expand(text) for text in ("12", "12_3", "12_3.batch")] == [["12"], ["12_3"], ["12_3.batch"]]


def test_following_a_sweep_loads_no_torch() -> None:
    code = "import sys, launchers.cli, launchers.slurm, launchers.status_table; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    loaded = set(done.stdout.strip("[]\n").replace("'", "").split(", "))
    assert "launchers.states" in loaded
    assert not {"torch", "transformers", "hydra", "omegaconf", "submitit", "pandas"} & loaded
