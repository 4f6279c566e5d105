"""Evaluation: rates, intervals, and the three objectives of one set of completions."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from race_sweeps.compose import compose_points
from race_sweeps.errors import UserError
from race_sweeps.evaluate import evaluate, interval, pass_rates
from race_sweeps.flops import Flops
from race_sweeps.models import policy_flops
from race_sweeps.rewards import Batch, Scores, Sparse
from race_sweeps.rollouts import Rollouts


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.booleans(), min_size=n, max_size=n))))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_one(case: tuple[int, list[bool]]) -> None:
    n, correct = case
    rates = pass_rates(correct, n, range(1, n + 1))
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(correct, k))
        assert rates[f"pass@{k}"] == pytest.approx(float(Fraction(sum(map(any, subsets)), len(subsets))), abs=1e-12)


def test_pass_at_k_averages_problems_and_counts_them_not_samples() -> None:
    rates = pass_rates([True, True, False, False], samples=2, ks=[1, 2])
    assert rates["pass@1"] == rates["pass@2"] == 0.5
    assert rates["pass@1_se"] == pytest.approx(math.sqrt(0.5 / 2))  # two problems, one always right, one never


def test_interval_is_wilson_of_yes_or_no_trials() -> None:
    # 15 of 50, Newcombe (1998), table I style: Wilson without continuity correction
    rate, n = 0.3, 50
    low, high = interval(rate, math.sqrt(rate * (1 - rate) / n), n)
    assert (round(low, 4), round(high, 4)) == (0.1910, 0.4375)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_interval_does_not_vanish_where_all_went_the_same_way(rate: float) -> None:
    low, high = interval(rate, 0.0, 32)
    assert 0 <= low <= rate <= high <= 1
    assert high - low == pytest.approx(1.959964**2 / (32 + 1.959964**2))


def test_interval_covers_the_truth_in_about_95_of_100_samples() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(2000):
        skill = [rng.betavariate(0.5, 1.5) for _ in range(60)]  # problems differ, as they do
        rates = pass_rates([rng.random() < p for p in skill for _ in range(4)], 4, [1])
        covered += rates["pass@1_ci"][0] <= 0.25 <= rates["pass@1_ci"][1]
    assert 0.93 <= covered / 2000 <= 0.97  # 95% within four standard errors of 2,000 trials


class _Written:
    """An engine that returns given texts, whatever the policy."""

    def __init__(self, texts: dict[str, list[str]]) -> None:
        self.texts, self.seen = texts, dict.fromkeys(texts, 0)

    def sample(self, model: Any, prompts: Any, sampling: Any, seed: int) -> Rollouts:
        self.order = []
        for prompt in prompts:
            self.order.append(self.texts[prompt][self.seen[prompt]])
            self.seen[prompt] += 1
        tokens = [[1] * len(text) for text in self.order]
        ids, n = [[1] * len(p) for p in prompts], len(prompts)
        return Rollouts(ids, tokens, [len(t) > 5 for t in tokens], [[0.0] * len(t) for t in tokens], [0] * n, 7)

    def decode(self, completion_ids: Any) -> list[str]:
        return self.order

    def close(self) -> None:
        pass


class _Length:
    """A judge whose score can be checked by hand: a tenth of the completion's length."""

    name, identity = "length", "length@1"

    def __call__(self, batch: Batch) -> Scores:
        return Scores([len(c) / 10 for c in batch.completions], flops=Flops(1000, 1100, 1200), counts={"long": 2})


def test_three_objectives_on_the_same_completions_in_the_order_of_the_problems() -> None:
    config = compose_points(
        ["model=tiny-s", "eval.problems=2", "eval.samples=2", "eval.pass_at=[1,2]"], multirun=False
    ).points[0][1]
    problems = [
        {
            "prompt": "1+2+3=",
            "question": "1+2+3=",
            "answer": "6",
            "extract": "equals",
            "id": "b",
        },  # the longer one comes first: order must be restored
        {"prompt": "1+2=", "question": "1+2=", "answer": "3", "extract": "equals", "id": "a"},
    ]
    engine = _Written({"1+2=": ["1+2=3", "3"], "1+2+3=": ["1+2=3+3=6", "1+2=3+3=7"]})
    result = evaluate(
        None, engine, Sparse("equals"), _Length(), policy_flops(config), "heldout", problems, config
    )  # fmt: skip
    assert result.outcomes["problem"] == [0, 0, 1, 1]
    assert result.outcomes["sample"] == [0, 1, 0, 1]
    assert result.outcomes["completion"] == ["1+2=3+3=6", "1+2=3+3=7", "1+2=3", "3"]
    assert result.outcomes["correct"] == [True, False, True, False]
    assert result.outcomes["judge"] == [0.9, 0.9, 0.5, 0.1]
    metrics = result.metrics
    assert metrics["pass@1"] == 0.5
    assert metrics["pass@2"] == 1.0
    assert metrics["judge"] == pytest.approx(0.6)
    assert metrics["judge_identity"] == "length@1"
    assert metrics["format"] == 0.75
    assert metrics["truncated"] == 0.5
    assert metrics["long"] == 2
    policy = policy_flops(config)
    search = sum(policy.search(len(p), t) for p, t in [("1+2=", 5), ("1+2=", 1), ("1+2+3=", 9), ("1+2+3=", 9)])
    assert result.flops.model == search + 1000
    assert result.flops.executed == 7 + 1100


@pytest.mark.parametrize(
    ("override", "field"),
    [("eval.pass_at=[1,4]", "eval.pass_at"), ("eval.pass_at=[]", "eval.pass_at"), ("eval.samples=0", "eval.samples")],
)
def test_impossible_evaluations_are_refused(override: str, field: str) -> None:
    with pytest.raises(UserError, match=field.replace(".", r"\.")):
        compose_points(["model=tiny-s", override], multirun=False)


def test_greedy_samples_are_refused() -> None:
    with pytest.raises(UserError, match="greedy completions"):
        compose_points(["model=tiny-s", "eval.samples=4", "eval.temperature=0"], multirun=False)
