"""Real runs whose reward is a model: their ledger against torch's count of everything that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flops_cases import eager_copy, eager_tiny

pytestmark = pytest.mark.slow

OVERRIDES = [
    "stage=A", "model=tiny-s", "sweep=count", "budget.flops=3e9", "budget.rungs=[0.5,1.0]", "train.prompts=6",
    "train.minibatch=24", "train.microbatch=8", "rollout.batch=20", "eval.problems=24", "eval.batch=10",
    "update_fraction.rho=0.45", "reward.scorer.batch=20",
]  # fmt: skip


@pytest.mark.parametrize("reward", ["prm-tiny-m", "prm_proxy"])
def test_the_ledger_of_a_run_is_what_ran(tmp_path: Path, reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from race_sweeps import ledger, models
    from race_sweeps.compose import compose_points
    from race_sweeps.models import prm
    from race_sweeps.sweep import make_points, write_folders
    from race_sweeps.train.run import run_point
    from tests.flops_counting import counted

    policy = str(eager_tiny(tmp_path))
    monkeypatch.setattr(models, "prepare", lambda _: policy)
    built = prm.location
    monkeypatch.setattr(prm, "location", lambda scorer: str(eager_copy(Path(built(scorer)), tmp_path)))
    points = make_points(
        compose_points([*OVERRIDES, f"reward={reward}", f"runs_dir={tmp_path}"], multirun=False).points
    )
    write_folders(points, ["test"])
    folder = points[0].folder

    found = counted(lambda: run_point(str(folder.path)))

    totals = ledger.read(folder.ledger).totals
    assert sum(flops.executed for flops in totals.flops.values()) == found
    assert 0 < totals.model("reward") < totals.flops["reward"].executed
    done = json.loads(folder.result.read_text())
    assert done["rho"] == pytest.approx(0.45, abs=0.03)
    rows = ledger.read(folder.ledger).rows
    assert all(row.tokens.prompt > 0 for row in rows if row.phase == "reward")
