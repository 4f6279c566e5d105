"""A real sweep from the command line: folders, manifest, skipping, and kills of everything at once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from race_sweeps import ledger
from race_sweeps.folder import RunFolder, read_rows

pytestmark = pytest.mark.slow

GRID = ["-m", "model=tiny-s", "update_fraction=rho55,rho80", "seed=0", "budget.flops=1.5e10", "eval.problems=64",
        "train.checkpoint_seconds=0"]  # fmt: skip
TIMING = ("seconds", "time", "step_time", "attempt")


def start(runs: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "race_sweeps", *GRID, f"runs_dir={runs}", "sweep=s", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )


def kill_everything(process: subprocess.Popen[str]) -> None:
    """SIGKILL of the command and of everything it started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=10)
    process.communicate()


def points(runs: Path) -> dict[str, RunFolder]:
    return {path.name: RunFolder(path) for path in sorted((runs / "s" / "points").iterdir())}


def ledger_bytes(runs: Path) -> int:
    return sum(path.stat().st_size for path in runs.glob("s/points/*/ledger.jsonl"))


def content(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_rows(path)]


def result(folder: RunFolder, ignore: Sequence[str] = ("seconds", "attempts")) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(folder.result.read_text())
    return {k: v for k, v in values.items() if k not in ignore}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("undisturbed")
    out, err = start(runs).communicate()
    assert "all 2 points done" in out, err
    return runs


def test_manifest_and_folders(undisturbed: Path) -> None:
    manifest = json.loads((undisturbed / "s" / "sweep.json").read_text())
    assert {p["id"] for p in manifest["points"]} == set(points(undisturbed))
    assert {p["update_fraction"] for p in manifest["points"]} == {"rho55", "rho80"}
    assert manifest["versions"]["torch"]
    for folder in points(undisturbed).values():
        assert folder.done
        assert folder.log.exists()
        planned = json.loads(folder.plan.read_text())
        done = result(folder)
        assert done["flops"]["total"] == pytest.approx(planned["budget"], rel=0.05)
        assert done["rho"] == pytest.approx(planned["rho"], abs=0.02)


def test_what_is_done_is_skipped_and_what_is_new_runs(undisturbed: Path) -> None:
    before = {name: folder.result.stat().st_mtime_ns for name, folder in points(undisturbed).items()}
    out, _ = start(undisturbed).communicate()
    assert "2 points, 2 done before, 0 to run" in out
    assert {name: folder.result.stat().st_mtime_ns for name, folder in points(undisturbed).items()} == before


def test_killed_five_times_the_sweep_ends_as_if_undisturbed(undisturbed: Path, tmp_path: Path) -> None:
    moments, kills = random.Random(1), 0
    while kills < 5:
        process = start(tmp_path)
        stop_at = ledger_bytes(tmp_path) + moments.randint(1, 3000)
        while process.poll() is None and ledger_bytes(tmp_path) < stop_at:
            time.sleep(0.002)
        assert process.poll() is None, "finished before the kill"
        kill_everything(process)
        kills += 1
    out, err = start(tmp_path).communicate()
    assert "all 2 points done" in out, err
    lost = 0
    for name, folder in points(tmp_path).items():
        reference = points(undisturbed)[name]
        mine, theirs = result(folder), result(reference)
        lost += mine["flops"].pop("lost")
        theirs["flops"].pop("lost")
        assert mine == theirs
        assert content(folder.evals) == content(reference.evals)
        assert content(folder.metrics) == content(reference.metrics)
        assert ledger.read(folder.ledger).totals.flops == ledger.read(reference.ledger).totals.flops
    assert lost > 0


def test_ctrl_c_leaves_the_sweep_resumable(undisturbed: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "train.checkpoint_seconds=1000")
    while ledger_bytes(tmp_path) < 1000:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, (out, err)
    assert "run the same command" in err
    out, err = start(tmp_path).communicate()
    assert "all 2 points done" in out, err
    for name, folder in points(tmp_path).items():
        assert result(folder) == result(points(undisturbed)[name])


def test_a_failing_point_does_not_touch_the_others(tmp_path: Path) -> None:
    process = start(tmp_path, "update_fraction=rho55", "train.learning_rate=1e-3,1e-4", "eval.problems=32")
    while not list(tmp_path.glob("s/points/*/log.txt")):
        time.sleep(0.01)
    victim = sorted(points(tmp_path))[0]
    (tmp_path / "s" / "points" / victim / "metrics.jsonl").mkdir()  # nothing can be appended to a folder
    out, err = process.communicate()
    assert process.returncode == 1, out
    assert f"{victim} failed" in err
    assert sum(folder.done for folder in points(tmp_path).values()) == 1
