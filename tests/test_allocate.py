"""The run-time controller: achieved rho and C follow the plan whatever the lengths do."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from race_sweeps.allocate import Allocator, Costs, minibatches, select, split
from race_sweeps.flops import Flops, ModelShape, PolicyFlops
from race_sweeps.ledger import Row, Tokens
from race_sweeps.models import ladder

SHAPE = ModelShape.from_config(ladder.config_dict("tiny-s"), "tiny-s")
POLICY = PolicyFlops(SHAPE, 16, SHAPE.adaptable)
GROUP = 8


def costs(old: bool = False, reference: bool = False, reward: int = 0) -> Costs:
    return Costs.of(POLICY, 8, 14, reward=reward, old=old, reference=reference)


def test_one_pass_over_everything_is_the_natural_rho() -> None:
    cost = costs()
    assert cost.rho(1.0) == cost.train / (cost.search + cost.train)
    assert cost.kappa(cost.rho(1.0)) == pytest.approx(1.0)


@given(st.floats(0.1, 6.0), st.booleans(), st.booleans(), st.integers(0, 10**9))
def test_kappa_inverts_rho(kappa: float, old: bool, reference: bool, reward: int) -> None:
    cost = costs(old, reference, reward)
    assert cost.kappa(cost.rho(kappa)) == pytest.approx(kappa, rel=1e-9)


def simulate(allocator: Allocator, lengths: random.Random, drift: float, seed: int) -> list[tuple[int, float]]:
    """Spend the budget on completions of random, drifting lengths; (C_total, rho) where each rung was reached."""
    reached: list[tuple[int, float]] = []
    step = 0
    while not allocator.finished:
        groups = allocator.next_groups()
        rows = groups * GROUP
        mean = 14 * (1 + drift * min(1.0, allocator.spent.total / allocator.rungs[-1]))
        sampled = [(lengths.randint(4, 12), max(1, round(lengths.gauss(mean, 3)))) for _ in range(rows)]
        search = sum(POLICY.search(p, t) for p, t in sampled)
        allocator.record(Row(step, "search", Flops(search), Tokens(), rows, 0.0))
        allocator.record(Row(step, "reward", Flops(), Tokens(), rows, 0.0))
        train = [POLICY.train(p, t) for p, t in sampled]
        passes = allocator.row_passes(train, [0] * rows, 0)
        order = select(passes, [0.0] * rows, GROUP, "random", random.Random(f"{seed} {step}"), allocator.generations)
        for part in minibatches(order, 64):
            step += 1
            allocator.record(Row(step, "learning", Flops(sum(train[i] for i in part)), Tokens(), len(part), 0.0))
        for _ in range(sum(allocator.reached(r) for r in allocator.rungs) - len(reached)):
            rho = allocator.spent.rho
            assert rho is not None
            reached.append((allocator.spent.total, rho))
    return reached


@settings(max_examples=40, deadline=None)
@given(
    rho=st.sampled_from([None, 0.40, 0.45, 0.55, 0.70, 0.80, 0.90]),
    drift=st.floats(-0.3, 0.3),
    seed=st.integers(0, 10**6),
    budget=st.integers(2 * 10**10, 10**11),
)
def test_achieved_budget_and_rho_close_on_the_target(rho: float | None, drift: float, seed: int, budget: int) -> None:
    rungs = (budget // 4, budget // 2, budget)
    allocator = Allocator(rho, rungs, GROUP, 32, 5.0, 0.005, costs())
    reached = simulate(allocator, random.Random(seed), drift, seed)
    assert len(reached) == 3
    for rung, (spent, achieved) in zip(rungs, reached, strict=True):
        group = allocator.group_cost
        if rho is None:  # nothing to adjust: as near as groups allow
            assert abs(spent - rung) <= max(0.05 * rung, 1.5 * group)
        else:
            assert abs(spent - rung) <= max(0.03 * rung, 0.6 * group)
            assert abs(achieved - rho) < 0.012


def test_replaying_the_ledger_restores_the_controller() -> None:
    rungs = (10**10,)
    allocator = Allocator(0.55, rungs, GROUP, 32, 5.0, 0.005, costs())
    rows = [
        Row(1, "search", Flops(10**9), Tokens(), 256, 0.0),
        Row(1, "learning", Flops(12 * 10**8), Tokens(), 200, 0.0),
        Row(2, "search", Flops(9 * 10**8), Tokens(), 256, 0.0),
    ]
    for row in rows:
        allocator.record(row)
    again = Allocator(0.55, rungs, GROUP, 32, 5.0, 0.005, costs())
    for row in rows:
        again.record(row)
    assert again == allocator
    assert again.next_groups() == allocator.next_groups()


@settings(max_examples=200)
@given(st.integers(1, 6), st.data(), st.sampled_from(["random", "max_variance"]), st.integers(0, 100))
def test_selection_takes_equally_from_every_group(groups: int, data: st.DataObject, keep: str, generation: int) -> None:
    rows = groups * GROUP
    passes = data.draw(st.integers(2 * groups, 5 * rows))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=rows, max_size=rows))
    order = select(passes, rewards, GROUP, keep, random.Random(0), generation)
    assert len(order) == passes
    taken = [sum(i // GROUP == g for i in order) for g in range(groups)]
    assert max(taken) - min(taken) <= 1
    counts = [order.count(i) for i in range(rows)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.floats(-2, 2), min_size=GROUP, max_size=GROUP), st.integers(2, GROUP - 1))
def test_max_variance_keeps_the_subset_of_largest_variance(rewards: list[float], count: int) -> None:
    def variance(rows: tuple[int, ...] | list[int]) -> float:
        mean = sum(rewards[i] for i in rows) / len(rows)
        return sum((rewards[i] - mean) ** 2 for i in rows) / len(rows)

    chosen = select(count, rewards, GROUP, "max_variance", random.Random(1), 0)
    best = max(variance(rows) for rows in itertools.combinations(range(GROUP), count))
    assert variance(chosen) == pytest.approx(best)


def test_which_groups_give_one_more_rotates() -> None:
    givers = set()
    for generation in range(4):
        order = select(2 * 4 + 1, [0.0] * 32, GROUP, "random", random.Random(0), generation)
        (more,) = [g for g in range(4) if sum(i // GROUP == g for i in order) == 3]
        givers.add(more)
    assert givers == {0, 1, 2, 3}


def test_minibatches_are_equal_give_or_take_one() -> None:
    assert [len(b) for b in minibatches(range(150), 64)] == [75, 75]
    assert [len(b) for b in minibatches(range(20), 64)] == [20]
    assert [len(p) for p in split(range(7), 3)] == [3, 2, 2]
    assert list(itertools.chain(*minibatches(range(150), 64))) == list(range(150))
