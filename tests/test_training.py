"""Real training on CPU: TRL, PEFT and `generate` on the smallest policy of the ladder."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from race_sweeps import ledger
from race_sweeps.folder import RunFolder, read_rows
from tests.conftest import MakePoint

pytestmark = pytest.mark.slow

# Budgets of a few generations, for speed: one is as uneven as its problems are long, hence 5% on C instead of 3%.
SMALL = ["model=tiny-s", "budget.flops=2e10", "eval.problems=64", "train.checkpoint_seconds=0"]
TIMING = ("seconds", "time", "step_time", "attempt")


def start(folder: RunFolder) -> subprocess.Popen[str]:
    code = "import sys; from race_sweeps.train.run import run_point; run_point(sys.argv[1])"
    return subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stderr=subprocess.PIPE, text=True)


def attempt(folder: RunFolder) -> int:
    """Run the point in a process of its own; its exit status."""
    process = start(folder)
    _, errors = process.communicate()
    if process.returncode:
        print(errors)
    return process.returncode


def content(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING} for row in read_rows(path)]


def result(folder: RunFolder) -> dict[str, Any]:
    values = json.loads(folder.result.read_text())
    return {k: v for k, v in values.items() if k not in ("point", "seconds", "attempts")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The small run, uninterrupted."""
    from race_sweeps import config as configuration
    from race_sweeps.folder import write_atomic
    from tests.conftest import compose_one

    folder = RunFolder(tmp_path_factory.mktemp("reference"))
    write_atomic(folder.config, configuration.save(compose_one(*SMALL)))
    assert attempt(folder) == 0
    return folder


def test_the_run_spends_its_budget_at_its_rho_and_is_evaluated_at_each_rung(reference: RunFolder) -> None:
    done = result(reference)
    assert done["flops"]["total"] == pytest.approx(2e10, rel=0.05)
    assert done["rho"] == pytest.approx(0.70, abs=0.02)
    assert done["flops"]["lost"] == 0
    assert sum(done["flops"][p] for p in ("search", "learning", "reward")) == done["flops"]["total"]
    rows = list(read_rows(reference.evals))
    assert [row["rung"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["flops"]["total"] == pytest.approx(row["budget"], rel=0.05)
        assert row["rho"] == pytest.approx(0.70, abs=0.02)
    book = ledger.read(reference.ledger)
    assert book.totals.total == done["flops"]["total"]
    assert list(reference.rollouts.glob("*.parquet"))


def test_the_same_configuration_and_seed_give_the_same_run(reference: RunFolder, make_point: MakePoint) -> None:
    again = make_point(SMALL)
    assert attempt(again) == 0
    for name in ("ledger", "metrics", "evals"):
        assert content(getattr(again, name)) == content(getattr(reference, name)), name
    assert result(again) == result(reference)


def test_another_seed_gives_another_run(reference: RunFolder, make_point: MakePoint) -> None:
    other = make_point([*SMALL, "seed=1"])
    assert attempt(other) == 0
    assert content(other.metrics) != content(reference.metrics)


def test_sigterm_checkpoints_and_the_next_attempt_loses_nothing(reference: RunFolder, make_point: MakePoint) -> None:
    folder = make_point([*SMALL, "train.checkpoint_seconds=1000"])
    process = start(folder)
    while not folder.metrics.exists():
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate()
    assert "Stopped" in errors
    assert not folder.done
    assert attempt(folder) == 0
    assert result(folder) == result(reference)


@pytest.mark.parametrize("damage", ["half-written", "cut", "one byte", "no seal", "torn seal"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage: str, make_point: MakePoint) -> None:
    from race_sweeps.train import checkpoints

    folder = make_point(SMALL)
    for step in (3, 12):
        path = folder.checkpoints / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "weights").write_bytes(bytes(range(256)))
        (path / "optimizer").write_bytes(b"moments")
        if step == 3 or damage != "half-written":
            checkpoints.seal(path, flops=step * 10**20)
    newer = folder.checkpoints / "checkpoint-12"
    assert damage == "half-written" or checkpoints.newest(folder.checkpoints) == (newer, 12 * 10**20)
    if damage == "cut":
        (newer / "weights").write_bytes(bytes(range(255)))
    elif damage == "one byte":
        (newer / "weights").write_bytes(bytes(range(1, 256)) + b"\0")
    elif damage == "no seal":
        (newer / checkpoints.SEAL).unlink()
    elif damage == "torn seal":
        (newer / checkpoints.SEAL).write_text("{")
    assert checkpoints.newest(folder.checkpoints) == (folder.checkpoints / "checkpoint-3", 3 * 10**20)
    assert not newer.exists()


def test_a_run_resumed_from_the_older_checkpoint_ends_the_same(reference: RunFolder, make_point: MakePoint) -> None:
    folder = make_point([*SMALL, "train.checkpoint_seconds=0"])
    process = start(folder)
    while len(list(folder.checkpoints.glob("checkpoint-*/complete"))) < 2:
        time.sleep(0.002)
    process.kill()
    process.wait()
    newest = max(folder.checkpoints.glob("checkpoint-*/complete"), key=lambda p: int(p.parent.name[11:])).parent
    weights = newest / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert attempt(folder) == 0
    undisturbed, found = result(reference), result(folder)
    assert found["flops"].pop("lost") > undisturbed["flops"].pop("lost") == 0
    assert found == undisturbed


def test_a_full_disk_is_one_line_and_the_run_goes_on_after_it(reference: RunFolder, make_point: MakePoint) -> None:
    folder = make_point([*SMALL, "train.checkpoint_seconds=0"])
    folder.checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder.checkpoints)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        process = start(folder)
        _, errors = process.communicate()
    finally:
        subprocess.run(["umount", str(folder.checkpoints)], check=True)
    assert process.returncode != 0
    assert "UserError" in errors
    assert not folder.done
    assert "the disk is full" in errors
    assert attempt(folder) == 0
    undisturbed, found = result(reference), result(folder)
    del found["flops"]["lost"], undisturbed["flops"]["lost"]  # the steps up to the checkpoint that did not fit
    assert found == undisturbed


@pytest.mark.parametrize("damage", ["absent", "edited"])
def test_a_ledger_that_does_not_match_its_checkpoint_is_refused(damage: str, make_point: MakePoint) -> None:
    folder = make_point([*SMALL, "train.checkpoint_seconds=0"])
    process = start(folder)
    while not list(folder.checkpoints.glob("checkpoint-*/complete")):
        time.sleep(0.002)
    process.kill()
    process.wait()
    if damage == "absent":
        folder.ledger.unlink()
    else:
        lines = folder.ledger.read_text().splitlines(keepends=True)
        folder.ledger.write_text("".join([lines[0], *lines[2:]]))
    again = start(folder)
    _, errors = again.communicate()
    assert again.returncode != 0
    assert "restore the ledger from a copy, or remove" in errors
    assert not folder.done


def test_a_step_past_several_rungs_is_evaluated_and_ledgered_once(make_point: MakePoint) -> None:
    folder = make_point(["model=tiny-s", "budget.flops=3e8", "eval.problems=16"])
    assert attempt(folder) == 0
    rows = list(read_rows(folder.evals))
    assert [row["rung"] for row in rows] == [0, 1, 2, 3]
    assert len({row["step"] for row in rows}) < 4
    evaluated = [r for r in read_rows(folder.ledger) if r["phase"] == "eval"]
    assert len(evaluated) == len({row["step"] for row in rows})
    assert result(folder)["flops"]["eval"] == sum(r["model_flops"] for r in evaluated)


def test_a_damaged_result_is_written_again(reference: RunFolder, tmp_path: Path) -> None:
    import shutil

    folder = RunFolder(tmp_path / "copy")
    shutil.copytree(reference.path, folder.path)
    folder.result.write_text("{")
    assert not folder.done
    assert attempt(folder) == 0
    assert result(folder) == result(reference)


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_sampler_and_trainer_old_logprobs_are_the_same_numbers(rho: float, make_point: MakePoint) -> None:
    """The log-probs kept from generation equal a further forward, to float32 rounding, at every update."""
    import torch

    from race_sweeps.train import run
    from race_sweeps.train.trainer import AllocatedGRPOTrainer

    torch.set_num_threads(1)
    differences: list[float] = []

    class Compared(AllocatedGRPOTrainer):
        def _old_logprobs(self, batch: dict[str, Any], kept: list[int]) -> None:
            sampled = batch["sampling_per_token_logps"].clone()
            super()._old_logprobs(batch, kept)
            mask = batch["completion_mask"][kept].bool()
            assert mask.any()
            gap = (batch["old_per_token_logps"][kept] - sampled[kept])[mask]
            differences.append(float(gap.abs().max()))

    folder = make_point(
        [
            "model=tiny-s",
            "budget.flops=1e10",
            "eval.problems=16",
            "train.old_logprobs=trainer",
            f"update_fraction.rho={rho}",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "AllocatedGRPOTrainer", Compared)
        run.run_point(str(folder.path))
    assert len(differences) >= 3
    assert max(differences) < 1e-4
    done = result(folder)
    assert done["rho"] == pytest.approx(rho, abs=0.02)
    assert math.isclose(done["flops"]["total"], 1e10, rel_tol=0.05)


@pytest.mark.parametrize(
    "setting",
    [["train.beta=0.05"], ["train.loss=bnpo"], ["train.minibatch=32", "train.microbatch=8"],
     ["update_fraction.keep=max_variance", "update_fraction.rho=0.5"], ["train.gradient_checkpointing=true"]],
    ids=lambda s: s[0],
)  # fmt: skip
def test_other_settings_train_to_their_budget(setting: list[str], make_point: MakePoint) -> None:
    folder = make_point(["model=tiny-s", "budget.flops=6e9", "budget.rungs=[1.0]", "eval.problems=16", *setting])
    assert attempt(folder) == 0
    done = result(folder)
    assert done["flops"]["total"] == pytest.approx(6e9, rel=0.05)
    losses = [row["loss"] for row in read_rows(folder.metrics)]
    assert any(abs(loss) > 0 for loss in losses)
    assert all(math.isfinite(loss) for loss in losses)
