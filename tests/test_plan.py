"""Planning: (C, rho) to kept, mu and steps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from race_sweeps.errors import UserError
from race_sweeps.flops import RewardFlops
from race_sweeps.models import policy_flops, reward_shape
from race_sweeps.plan import costs, plan
from tests.conftest import compose_one

TINY = compose_one("model=tiny-m")


@pytest.mark.parametrize("model", ["1.5b", "3b", "7b", "tiny-s", "tiny-m", "tiny-l"])
@pytest.mark.parametrize("rho", [0.45, 0.55, 0.70, 0.80, 0.90])
def test_the_published_fractions_are_reachable_and_planned_exactly(model: str, rho: float) -> None:
    config = compose_one(f"model={model}", f"update_fraction.rho={rho}")
    made = plan(config)
    assert made.rho == pytest.approx(rho, abs=1e-9)
    assert made.flops["total"] == sum(made.flops[p] for p in ("search", "learning", "reward"))
    assert made.flops["total"] == pytest.approx(made.budget, rel=0.01)
    assert made.flops["learning"] / made.flops["total"] == pytest.approx(rho, abs=1e-6)
    assert 2 <= made.kept <= 8
    assert made.mu == 1 or made.kept == 8  # the smaller mu is preferred
    assert made.rungs[-1] == made.budget == round(config.budget.flops)


def test_published_cells_move_c_and_not_rho() -> None:
    cells = {a: plan(compose_one("model=3b", f"update_fraction=a{a}")) for a in (40, 70, 100, 140, 180)}
    assert len({cell.rho for cell in cells.values()}) == 1
    assert [cells[a].budget for a in cells] == [round(4e18 * f) for f in (0.4, 0.7, 1.0, 1.4, 1.8)]
    assert all((cell.kept, cell.mu) == (8, 1) for cell in cells.values())


@pytest.mark.parametrize("rho", [0.1, 0.3, 0.95, 0.99])
def test_out_of_reach_names_the_interval_and_a_neighbour_that_works(rho: float) -> None:
    with pytest.raises(UserError) as caught:
        plan(compose_one("model=3b", f"update_fraction.rho={rho}"))
    text = str(caught.value)
    low, high = map(float, re.search(r"reachable is ([\d.]+) to ([\d.]+)", text).groups())  # type: ignore[union-attr]
    nearest = float(re.search(r"nearest: update_fraction.rho=([\d.]+)", text).group(1))  # type: ignore[union-attr]
    assert nearest == (low if rho < low else high)
    for works in (low, high, nearest):
        assert plan(compose_one("model=3b", f"update_fraction.rho={works}")).rho == pytest.approx(works)


def test_a_budget_below_one_group_is_refused() -> None:
    with pytest.raises(UserError, match=r"budget.flops=1000: less than one group of 8 completions"):
        plan(compose_one("model=1.5b", "budget.flops=1000"))


@given(st.floats(0.40, 0.90), st.floats(1e10, 1e13))
def test_a_larger_rho_buys_fewer_completions(rho: float, budget: float) -> None:
    budgeted = replace(TINY, budget=replace(TINY.budget, flops=budget))
    low = replace(budgeted, update_fraction=replace(TINY.update_fraction, rho=rho - 0.01))
    high = replace(budgeted, update_fraction=replace(TINY.update_fraction, rho=rho))
    assert plan(high).completions <= plan(low).completions
    assert plan(high).kappa > plan(low).kappa


def test_trainer_side_old_logprobs_raise_the_reachable_rho() -> None:
    sampler = plan(compose_one("model=3b", "train.old_logprobs=sampler"))
    trainer = plan(compose_one("model=3b", "train.old_logprobs=trainer"))
    assert trainer.reachable_rho[0] > sampler.reachable_rho[0]
    assert trainer.completions == sampler.completions  # the same rho leaves the same share to search
    assert trainer.kappa < sampler.kappa


def test_a_reward_model_is_charged_for_the_tokens_it_reads() -> None:
    lengths = ("rollout.expected_prompt=256", "rollout.expected_completion=1024", "update_fraction=a100")
    config = compose_one("model=3b", "reward=prm", *lengths)
    made, rules = plan(config), plan(compose_one("model=3b", *lengths))
    scorer = RewardFlops(reward_shape(config))  # type: ignore[arg-type]
    assert made.flops["reward"] == made.completions * scorer.score(256 + 1024 + 32 + 10, 10)
    assert rules.flops["reward"] == 0
    assert made.rho == pytest.approx(0.39, abs=0.01)  # 0.67 with rules: the reward model takes 0.42 of the compute
    assert made.reachable_rho[1] < rules.reachable_rho[1]
    assert made.memory["reward"] == 2 * (7_615_616_512 - 152_064 * 3584 + 3584 * 3584 + 3 * 3584 + 2)  # its own head


def test_a_prefix_cache_makes_search_cheaper_and_moves_the_reachable_rho() -> None:
    """Section 3.3 with what vLLM caches: the first of a group pays its prompt, the others what is left of it after
    whole blocks of 16."""
    plans, prices = [], []
    for engine in ("transformers", "vllm"):
        config = compose_one("model=3b", f"rollout={engine}", "update_fraction=a100", "rollout.vllm.sleep=true")
        policy = policy_flops(config)
        plans.append(plan(config))
        prices.append(costs(config, policy))
    prompt, completion = config.rollout.expected_prompt, config.rollout.expected_completion
    assert prompt == 160
    saved = policy.forward(0, 144, 0)  # nine blocks of 159 tokens
    assert prices[0].search == policy.search(prompt, completion)
    assert prices[0].search - prices[1].search == -(-7 * saved // 8)
    assert plans[1].rho > plans[0].rho + 0.01
    assert plans[1].reachable_rho[0] > plans[0].reachable_rho[0]
