"""Simulated runs: the surface they draw from, files like a real run's, and that they say what they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from race_sweeps import ledger
from race_sweeps.config import ResponseConfig
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder, read_rows
from race_sweeps.plan import plan
from race_sweeps.train.response import Response
from race_sweeps.train.simulated import run_point
from tests.conftest import MakePoint, compose_one

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("trainer=simulated", "model=tiny-s", "budget.flops=2e10", "eval.problems=200")


def test_the_surface() -> None:
    config = ResponseConfig(
        start=0.2, ceiling=0.8, ceiling_per_decade=0.1, half=1e12, half_power=1.0, size=1e6, steepness=1.0,
        optimum=0.6, curvature=0.5,
    )  # fmt: skip
    response = Response(config, 1e6)
    assert response.value(0, None) == 0.2
    assert response.value(1e12, 0.6) == pytest.approx(0.5), "half of the way at the optimum"
    assert response.value(3e12, 0.6) == pytest.approx(0.2 + 0.6 * 0.75)
    e = 2.718281828459045
    beside = 1.5 * e / (1 + 1.5 * e)  # one unit of logit above 0.6
    assert response.value(1e12, beside) == pytest.approx(0.2 + 0.3 * (1 - 0.5))
    assert response.optimum(1e12) == pytest.approx(0.6)
    larger = Response(config, 1e7)
    assert larger.half == pytest.approx(1e13)
    assert larger.value(1e12, 0.6) < response.value(1e12, 0.6)
    assert larger.value(1e15, 0.6) > response.value(1e15, 0.6), "its ceiling is higher"
    assert Response(config, 1e6, shift=1.0).optimum(1e12) == pytest.approx(beside)


def run_all(point: RunFolder) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    rows = [row.to_json() for row in ledger.read(point.ledger).rows]
    drop = ("time", "attempt")
    return (
        [{k: v for k, v in row.items() if k not in drop} for row in rows],
        [{k: v for k, v in row.items() if k not in drop} for row in read_rows(point.evals)],
    )


def test_files_of_a_run(make_point: MakePoint) -> None:
    point = make_point(SMALL)
    run_point(str(point.path))
    result = json.loads(point.result.read_text())
    planned = plan(compose_one(*SMALL))
    assert (result["simulated"], planned.simulated, (point.path / "SIMULATED").exists()) == (True, True, True)
    assert result["flops"]["total"] == pytest.approx(planned.budget, rel=0.01)
    assert result["rho"] == pytest.approx(planned.rho, abs=0.02)
    totals = ledger.read(point.ledger).totals
    assert (totals.total, totals.model("eval")) == (result["flops"]["total"], result["flops"]["eval"])
    evals = list(read_rows(point.evals))
    assert [row["rung"] for row in evals] == [0, 1, 2, 3]
    assert all(row["simulated"] for row in evals)
    assert all(abs(row["pass@1"] - row["true"]) < 4 * (row["pass@1_se"] + 0.02) for row in evals)
    assert next(iter(read_rows(point.metrics)))["simulated"] is True
    again = make_point(SMALL)
    run_point(str(again.path))
    assert run_all(point) == run_all(again)
    other = make_point((*SMALL, "trainer.response.noise_seed=1"))
    run_point(str(other.path))
    assert run_all(point)[1] != run_all(other)[1]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_ends_as_an_undisturbed_one(make_point: MakePoint, signum: signal.Signals) -> None:
    straight, point = make_point(SMALL), make_point((*SMALL, "train.checkpoint_seconds=0", "trainer.pace=0.02"))
    run_point(str(straight.path))
    code = f"from race_sweeps.train.simulated import run_point; run_point({str(point.path)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    while not list(point.checkpoints.glob("*/complete")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signum)
    assert process.wait() != 0
    assert not point.done
    run_point(str(point.path))
    assert run_all(point) == run_all(straight)
    assert json.loads(point.result.read_text())["attempts"] == 2


def test_the_surface_is_checked() -> None:
    with pytest.raises(UserError, match=r"trainer\.response\.optimum=1\.5: must lie between 0 and 1"):
        compose_one("trainer=simulated", "trainer.response.optimum=1.5")
    with pytest.raises(UserError, match=r"trainer=simulatd: did you mean 'simulated'"):
        compose_one("trainer=simulatd")


def test_shapes_of_the_surface() -> None:
    def values(trainer: str) -> list[float]:
        config = compose_one(f"trainer={trainer}", "model=tiny-m").trainer.response
        response = Response(config, config.size)
        return [response.value(config.half, rho) for rho in (0.45, 0.55, 0.7, 0.8, 0.9)]

    inside, edge, plateau = values("simulated"), values("simulated_edge"), values("simulated_plateau")
    assert inside.index(max(inside)) == 2
    assert edge == sorted(edge, reverse=True)
    assert len(set(edge)) == 5
    assert len(set(plateau)) == 1


def test_a_sweep_says_it_and_loads_no_torch(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    code = """
import sys
from race_sweeps.cli import main
status = main(["-m", *sys.argv[1:]])
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(status)
"""
    grid = ["update_fraction=rho55,rho70", "seed=0", "sweep=sim"]
    done = subprocess.run(
        [sys.executable, "-c", code, "stage=A", *SMALL, *grid],
        cwd=tmp_path, capture_output=True, text=True, env=environ, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SIMULATED: runs/sim: 2 points")
    sweep = tmp_path / "runs" / "sim"
    assert (sweep / "SIMULATED").exists()
    assert json.loads((sweep / "sweep.json").read_text())["simulated"] is True
    shown = subprocess.run(
        [sys.executable, "-m", "launchers", "status", str(sweep)], capture_output=True, text=True, env=environ
    )
    assert shown.stdout.startswith("SIMULATED sim: 2 done")
