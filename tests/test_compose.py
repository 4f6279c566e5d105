"""Composition: Hydra's semantics, one compose per set of group choices, and errors a user can act on."""

from __future__ import annotations

import random

import pytest
from hydra import compose, initialize_config_dir

from race_sweeps import config as schema
from race_sweeps.compose import compose_points, conf_dir
from race_sweeps.config import keys, point_id
from race_sweeps.errors import UserError
from race_sweeps.sweep import make_points
from tests.conftest import compose_one

STAGES = sorted(p.stem for p in (conf_dir() / "stage").glob("*.yaml"))
MODELS = sorted(p.stem for p in (conf_dir() / "model").glob("*.yaml"))


@pytest.mark.parametrize("stage", STAGES)
def test_every_point_of_a_stage_equals_hydras_own_compose(stage: str) -> None:
    composed = compose_points([f"stage={stage}", f"model={','.join(MODELS)}", "budget.flops=1e17"], multirun=True)
    assert len(composed.points) >= len(MODELS) * 5
    some = random.Random(stage).sample(composed.points, 60)  # Hydra's own is slow
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for lines, ours in some:
            assert ours == schema.from_typed(schema.typed(compose("config", list(lines))))


def test_stage_a_is_sizes_by_fractions_by_seeds() -> None:
    points = [config for _, config in compose_points(["stage=A"], multirun=True).points]
    assert {p.model.name for p in points} == {"1.5b", "3b", "7b"}
    assert {p.update_fraction.rho for p in points} == {0.45, 0.55, 0.70, 0.80, 0.90}
    assert {p.seed for p in points} == {0, 1, 2}
    assert len(points) == 45
    assert len({point_id(p) for p in points}) == 45


def test_stages_of_reward_systems_share_a_judge_and_leave_out_what_cannot_be_reached() -> None:
    for stage, rewards in (
        ("B", {"sparse", "structured", "dense", "dense_verifier", "prm_proxy"}),
        ("C", {"sparse", "prm_proxy", "prm"}),
        ("D", {"prm", "prm-thought"}),
    ):
        composed = compose_points([f"stage={stage}", "model=3b", "seed=0"], multirun=True).points
        said: list[str] = []
        made = make_points(composed, said.append)
        assert {point.config.reward.name for point in made} == rewards
        assert {point.config.judge.name for point in made} == {"qwen-math-prm-7b"}
        assert all(point.plan.rho == pytest.approx(point.config.update_fraction.rho) for point in made)
        assert len(made) + len(said) == len(composed)
        assert all("out of reach" in line and "reachable is" in line for line in said)


def test_a_grid_with_nothing_in_reach_is_an_error() -> None:
    with pytest.raises(UserError, match="out of reach"):
        make_points(compose_points(["stage=B", "model=3b", "update_fraction.rho=0.98"], multirun=True).points)


def test_the_command_line_wins_over_the_stage() -> None:
    points = compose_points(["model=tiny-s", "seed=7", "update_fraction=rho55,a40"], multirun=True).points
    assert [(c.model.name, c.update_fraction.name, c.seed) for _, c in points] == [
        ("tiny-s", "rho55", 7),
        ("tiny-s", "a40", 7),
    ]


def test_a_model_brings_its_scale_and_the_command_line_may_change_it() -> None:
    assert compose_one("model=tiny-s").data.name == "chain"
    assert compose_one("model=tiny-s").train.prompts == compose_one("model=tiny-l").train.prompts != 32
    assert compose_one("model=1.5b").budget.flops == 4e18
    assert compose_one("model=tiny-s", "budget.flops=1e9").budget.flops == 1e9


def test_point_id_ignores_where_and_depends_on_what() -> None:
    base = point_id(compose_one("model=tiny-s"))
    same = ("sweep=other", "runs_dir=elsewhere", "plan.device=a100", "train.checkpoint_seconds=1")
    assert all(point_id(compose_one("model=tiny-s", o)) == base for o in same)
    different = ("seed=1", "budget.flops=1e10", "train.learning_rate=1e-4", "lora.rank=8", "eval.problems=10")
    assert len({base, *(point_id(compose_one("model=tiny-s", o)) for o in different)}) == 6


def test_saved_configuration_reads_back() -> None:
    for model in MODELS:
        config = compose_one(f"model={model}")
        assert schema.load(schema.save(config)) == config


def test_every_key_can_be_overridden_from_the_command_line() -> None:
    assert compose_one("rollout.top_p=0.9", "train.old_logprobs=trainer").rollout.top_p == 0.9
    assert "update_fraction.rho" in set(keys())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model=9b", "model=9b: did you mean '7b'? valid: 0.5b, 1.5b, 3b, 7b, smollm2-135m, tiny-l, tiny-m, tiny-s"),
        ("stage=Z", "stage=Z: valid: A, B, C, D"),
        ("budgt.flops=1", "budgt.flops: no such key; did you mean 'budget.flops'?"),
        ("budget.flosp=1", "budget.flosp: no such key; did you mean 'budget.flops'?"),
        ("+foo=1", "foo: no such key"),
        ("budget.flops=-1", "budget.flops=-1.0: must be a positive number"),
        ("budget.flops=nan", "budget.flops=nan: must be a positive number"),
        ("budget.flops=much", "budget.flops: value 'much' of type 'str' could not be converted to Float"),
        ("budget.rungs=[0.5]", "budget.rungs=[0.5]: shares of the budget"),
        ("seed=-1", "seed=-1: must not be negative"),
        ("train.group=1", "train.group=1: GRPO compares completions within a group"),
        ("train.loss=dapo", "train.loss=dapo: did you mean 'dr_grpo'?"),
        ("train.minibatch=60", "train.minibatch=60: must be a multiple of train.microbatch=8"),
        ("rollout.top_p=0.9", "train.old_logprobs=sampler: the sampler's log-probs are those of the truncated"),
        ("sweep=../up", "sweep=../up: use letters, digits"),
        ("plan.device=h1000", "plan.device=h1000: did you mean 'h200'?"),
        ("update_fraction.rho=1.5", "update_fraction.rho=1.5: must lie between 0 and 1"),
        ("data.path=/no/such/file", "data.path=/no/such/file: no such file"),
        ("~train.group", "every key has its use"),
        ("seed=1,2", "seed=1,2: a sweep over several values needs -m"),
        ("foo", "Error parsing override 'foo'"),
    ],
)
def test_mistakes_are_one_line(override: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_points(["model=1.5b", override], multirun=False)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_stage_per_sweep() -> None:
    with pytest.raises(UserError, match="one stage per sweep"):
        compose_points(["stage=A,B"], multirun=True)


def test_an_update_fraction_is_called_what_it_is_however_it_was_set() -> None:
    def named(*overrides: str) -> str:
        return compose_points(["model=tiny-s", *overrides], multirun=False).points[0][1].update_fraction.name

    assert named("update_fraction=rho55") == named("update_fraction.rho=0.55") == "rho55"
    assert named("update_fraction.rho=0.625") == "rho62.5"
    assert named("update_fraction.rho=null") == named("update_fraction=a100") == "a100"
    same = [compose_points(["model=tiny-s", o], multirun=False).points[0][1] for o in
            ("update_fraction=rho55", "update_fraction.rho=0.55")]  # fmt: skip
    assert point_id(same[0]) == point_id(same[1])
