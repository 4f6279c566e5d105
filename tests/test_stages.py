"""Stages B, C and D for real on the embedded ladder: three objectives at each rung, and a charged reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from race_sweeps import ledger
from race_sweeps.cli import main
from race_sweeps.folder import RunFolder

pytestmark = pytest.mark.slow

SMALL = ["model=tiny-s", "judge=prm-tiny-m", "update_fraction.rho=0.45", "seed=0", "budget.flops=6e9",
         "budget.rungs=[0.5,1.0]", "train.prompts=6", "train.minibatch=24", "train.microbatch=24",
         "eval.problems=64"]  # fmt: skip
TINY = {"B": "sparse,structured,dense,dense_verifier,prm_proxy",
        "C": "prm-tiny-s,prm-tiny-m,prm-tiny-l",
        "D": "prm-tiny-m,prm-tiny-thought"}  # fmt: skip


@pytest.mark.parametrize("stage", TINY)
def test_a_stage_runs_end_to_end(stage: str, tmp_path: Path) -> None:
    names = TINY[stage].split(",")
    assert main(["-m", f"stage={stage}", f"reward={TINY[stage]}", f"runs_dir={tmp_path}", *SMALL]) == 0

    sweep = json.loads((tmp_path / stage / "sweep.json").read_text())
    assert sorted(point["reward"] for point in sweep["points"]) == sorted(names)
    judges = set()
    for point in sweep["points"]:
        folder = RunFolder(tmp_path / stage / "points" / point["id"])
        evals: list[dict[str, Any]] = [json.loads(line) for line in folder.evals.read_text().splitlines()]
        assert [row["rung"] for row in evals] == [0, 1, 2]  # before training, and at each rung
        for row in evals:
            assert 0 <= row["pass@1"] <= 1
            assert 0 <= row["judge"] <= 1
            assert row["native_reward"] >= 0
            judges.add(row["judge_identity"])
        totals = ledger.read(folder.ledger).totals
        assert totals.model("eval") > 0
        assert (totals.model("reward") > 0) == point["reward"].startswith("prm")
        if point["reward"] == "sparse":
            assert all(row["native_reward"] == row["pass@1"] for row in evals)
    assert len(judges) == 1  # one common judge, by its weights
    assert next(iter(judges)).startswith("prm-tiny-m@")
