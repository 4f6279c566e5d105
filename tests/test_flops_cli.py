"""`python -m race_sweeps flops`: exact figures, readable figures, one clear line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from race_sweeps.cli import main
from race_sweeps.flops import ModelShape, PolicyFlops, RewardFlops
from tests.flops_cases import config_of, published


@pytest.fixture
def model(tmp_path: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    return str(tmp_path)


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["flops", *arguments, "--json"]) == 0
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def policy() -> PolicyFlops:
    shape = ModelShape.from_config(config_of("qwen2"), "test")
    return PolicyFlops(shape, 4, shape.adaptable)


LENGTHS = ("--prompt", "7", "--completion", "5", "--group", "4", "--prompts", "3", "--lora-rank", "4")


def test_a_step_is_the_sum_of_its_completions(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, model, *LENGTHS, "--kept", "2.5", "--mu", "2", "--old", "--beta", "--steps", "6")
    count = policy()
    step = {
        "search": 12 * count.search(7, 5),
        "learning": 16 * count.train(7, 5) + 8 * count.score(7, 5) + 12 * count.score(7, 5, adapter=False),
        "reward": 0,
    }  # 3 groups of 4; 2.5 of each make 7.5, rounded to 8 kept, each passed over twice
    total = sum(step.values())
    assert found["model"]["step"] == {**step, "total": total}
    assert found["model"]["run"] == {phase: 6 * flops for phase, flops in {**step, "total": total}.items()}
    assert found["model"]["rho"] == step["learning"] / total
    assert found["paper"]["step"]["search"] == 12 * count.paper_search(12)
    assert found["paper"]["step"]["learning"] == 12 * count.paper_learning(12)


def test_a_prefix_cache_reads_a_prompt_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, model, *LENGTHS, "--cached")
    count = policy()
    assert found["model"]["step"]["search"] == 3 * (count.search(7, 5) + 3 * count.search(7, 5, cached=6))


def test_a_reward_model_is_a_third_share(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, model, *LENGTHS, "--prm", "tiny-s")
    assert main(["flops", "tiny-s", "--json"]) == 0
    from race_sweeps.models import ladder

    reward = RewardFlops(ModelShape.from_config(ladder.config_dict("tiny-s"), "tiny-s"))
    assert found["model"]["step"]["reward"] == 12 * reward.score(12)
    assert found["model"]["phi"] == found["model"]["step"]["reward"] / found["model"]["step"]["total"]


def test_executed_and_full_fine_tuning(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = figures(capsys, model, *LENGTHS, "--convention", "executed")["executed"]
    again = figures(capsys, model, *LENGTHS, "--convention", "executed", "--checkpointing")["executed"]
    assert plain["step"]["search"] == again["step"]["search"] == 3 * policy().search_executed([7] * 4, [5] * 4)
    assert plain["step"]["learning"] < again["step"]["learning"]
    full = figures(capsys, model, *LENGTHS[:-1], "0")
    assert full["trainable"] == full["parameters"]


def test_the_published_shares_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    shared, prm = str(published("Qwen2.5-3B")), str(published("Qwen2.5-Math-PRM-7B"))
    rules = figures(capsys, shared)
    assert (round(rules["paper"]["rho"], 2), round(rules["model"]["rho"], 2)) == (0.72, 0.67)
    reward = figures(capsys, shared, "--prm", prm)
    assert (round(reward["paper"]["rho"], 2), round(reward["model"]["rho"], 2)) == (0.44, 0.40)
    assert figures(capsys, "3b")["model"] == rules["model"]  # the shipped name has the same sizes


def test_the_table_is_for_people(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", model, *LENGTHS]) == 0
    shown = capsys.readouterr().out
    for words in ("LoRA r = 4", "3 prompts x 4 completions of 7 + 5 tokens", "learning (rho)", "paper: step", "total"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 120
    assert main(["flops", "--help"]) == 0
    assert "--lora-rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "0"], "--prompt 0: must be at least 1"),
        (["--completion", "-3"], "--completion -3"),
        (["--steps", "0"], "--steps 0"),
        (["--prompts", "0"], "--prompts 0"),
        (["--group", "1"], "--group 1"),
        (["--kept", "9"], "--kept 9: completions kept of a group of 8"),
        (["--kept", "0"], "--kept 0"),
        (["--kept", "nan"], "--kept nan"),
        (["--mu", "0.5"], "--mu 0.5"),
        (["--mu", "inf"], "--mu inf"),
        (["--lora-rank", "-1"], "--lora-rank -1"),
        (["--convention", "modle"], "did you mean 'model'?"),
        (["--convention", "model,paper"], "rows of two conventions do not add up"),
        (["--prm", "tiny-z"], "did you mean 'tiny-s'?"),
        (["--prompt", "many"], "invalid int value"),
        (["--completions", "3"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", "tiny-s", *arguments]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_an_unknown_model_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", "tiny-x"]) == 2
    assert "no such name, config.json or folder; did you mean 'tiny-" in capsys.readouterr().err
    assert main(["flops", str(published("Qwen2.5-Math-PRM-7B"))]) == 2
    assert "pass it as --prm" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    code = "import sys; from race_sweeps.cli import main\n"
    code += "main(['flops', 'tiny-s', '--json']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
