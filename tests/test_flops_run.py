"""The ledger of a real training run against torch's count of everything that run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.flops_cases import eager_tiny

pytestmark = pytest.mark.slow

OVERRIDES = [
    "stage=A", "model=tiny-s", "sweep=count", "budget.flops=4e9", "budget.rungs=[0.5,1.0]", "train.prompts=6",
    "train.minibatch=24", "train.microbatch=8", "rollout.batch=20", "eval.problems=24", "eval.batch=10",
    "train.old_logprobs=trainer", "train.beta=0.04",
]  # fmt: skip


@pytest.mark.parametrize(
    ("rho", "checkpointing", "triton"),
    [(0.68, False, False), (0.88, False, False), (0.88, True, False), (0.68, False, True)],
)
def test_the_ledger_of_a_run_is_what_ran(
    tmp_path: Path, rho: float, checkpointing: bool, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.trainer import utils as trl_utils

    from race_sweeps import ledger, models
    from race_sweeps.compose import compose_points
    from race_sweeps.folder import RunFolder
    from race_sweeps.sweep import make_points, write_folders
    from race_sweeps.train.run import run_point
    from tests.flops_counting import counted

    policy = str(eager_tiny(tmp_path))
    monkeypatch.setattr(models, "prepare", lambda _: policy)
    monkeypatch.setattr(trl_utils, "_use_triton", lambda _: triton)  # which positions the head scores
    choices = [f"update_fraction.rho={rho}", f"train.gradient_checkpointing={checkpointing}", f"runs_dir={tmp_path}"]
    points = make_points(compose_points([*OVERRIDES, *choices], multirun=False).points)
    write_folders(points, ["test"])
    folder: RunFolder = points[0].folder

    found = counted(lambda: run_point(str(folder.path)))

    totals = ledger.read(folder.ledger).totals
    written: dict[str, Any] = json.loads(folder.result.read_text())
    kappa = written["trained"] / written["completions"]
    assert kappa < 1 if rho == 0.68 else kappa > 1  # kept < G, or more than one pass
    assert written["steps"] >= 5
    executed = sum(flops.executed for flops in totals.flops.values())
    assert executed == found
