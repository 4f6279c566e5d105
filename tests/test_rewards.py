"""Rule rewards and a user's own: exact values of hand-made completions, and what each part can and cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from race_sweeps import rewards
from race_sweeps.config import REWARD_WEIGHTS
from race_sweeps.data import chain
from race_sweeps.errors import UserError
from race_sweeps.rewards import Batch, Custom, Dense, DenseVerifier, Scores, Sparse, Structured
from race_sweeps.rewards.rules import arithmetic, closeness, equations
from tests.conftest import compose_one


def batch(*rows: tuple[str, str, str], truncated: bool = False) -> Batch:
    """Rows of (question, reference, completion)."""
    questions, references, completions = zip(*rows, strict=True)
    n = len(rows)
    return Batch(questions, references, completions, [1] * n, [truncated] * n)


CHAIN = [
    ("7+3*8-2=", "8", "7+3=0*8=0-2=8"),  # right
    ("7+3*8-2=", "8", "7+3=1*8=8-2=8"),  # a wrong fact and a right answer
    ("7+3*8-2=", "8", "7+3=0*8=0-2=6"),  # off by two
    ("7+3*8-2=", "8", "8=8"),  # no working
    ("7+3*8-2=", "8", "7+3=0*8="),  # no answer
    ("7+3*8-2=", "8", "7+3=0*8=0-2=8*1=8"),  # a step too many
]


def test_sparse_on_chains() -> None:
    scores = Sparse("equals")(batch(*CHAIN))
    assert scores.values == [1, 1, 0, 1, 0, 1]
    assert scores.components == {"correct": scores.values}
    assert (scores.flops, scores.counts) == (rewards.NO_FLOPS, {})


def test_structured_on_chains() -> None:
    scores = Structured("equals", chain=True)(batch(*CHAIN))
    assert scores.components["answered"] == [1, 1, 1, 1, 0, 1]
    assert scores.components["stepwise"] == pytest.approx([1, 1, 1, 0, 2 / 3 - 1 / 3, 1])
    assert scores.components["finished"] == [1] * 6
    assert scores.values[0] == pytest.approx(1.3)
    assert Structured("equals", chain=True)(batch(CHAIN[0], truncated=True)).values == pytest.approx([1.2])


def test_dense_on_chains() -> None:
    scores = Dense("equals", chain=True)(batch(*CHAIN))
    near = 1 / (1 + 2 / 8)
    assert scores.components["closeness"] == pytest.approx([1, 1, near, 1, 0, 1])
    assert scores.values[2] == pytest.approx(0.3 * near + 0.2)


def test_dense_verifier_on_chains() -> None:
    scores = DenseVerifier("equals", chain=True)(batch(*CHAIN))
    assert scores.components["equations"] == pytest.approx([1, 1 / 3, 2 / 3, 0, 1 / 3, 3 / 4])
    assert scores.values[0] == 1


MATH = [
    ("q", "18", "She has 16 - 3 = 13.\nThen 13 + 5 = 18, so \\boxed{18}."),
    ("q", "18", "16 - 3 = 13 and 13 + 5 = 17: \\boxed{17}"),
    ("q", "18", "\\boxed{18}"),
    ("q", "18", "it is 18"),
    ("q", "(1, \\frac{1}{2})", "so $\\boxed{(1, 0.25)}$"),
    ("q", "\\frac{1}{2}", "$2^{-1} = \\frac{1}{2}$ so $\\boxed{2^{-1}}$"),
]


def test_rules_on_mathematics() -> None:
    found = batch(*MATH)
    assert Sparse("math")(found).values == [1, 0, 1, 1, 0, 1]
    structured = Structured("math")(found)
    assert structured.components["answered"] == [1, 1, 1, 0, 1, 1]
    assert structured.components["stepwise"] == [1, 1, 0, 0, 1, 1]
    assert Dense("math")(found).components["closeness"] == pytest.approx([1, 1 / (1 + 1 / 18), 1, 1, (1 + 0.8) / 2, 1])
    assert DenseVerifier("math")(found).components["equations"] == [1, 0.5, 0, 0, 0, 1]


def test_equations_of_a_working() -> None:
    text = (
        "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n"
        "So $x + 2 = 5$ and $2 \\times 3 = 6 = 3 \\cdot 2$, f(2) = 4, 2x = 3, 4 = 4, \\frac{1}{2} = 0.5\n#### 18"
    )
    assert equations(text) == [
        ("16 - 3 - 4", "9"),
        ("9 * 2", "18"),
        ("2 * 3", "6"),
        ("6", "3 * 2"),
        ("\\frac{1}{2}", "0.5"),
    ]


@pytest.mark.parametrize(
    ("left", "right", "holds"),
    [
        ("16 - 3 - 4", "9", True),
        ("16 - 3 - 4", "10", False),
        ("(2 + 3) * -4", "-20", True),
        ("100 / 3", "33.33", True),
        ("100 / 3", "33.34", False),
        ("1,200 * 2", "2,400", True),
        ("007 + 1", "8", True),
        ("0.1 + 0.2", "0.3", True),
        ("1 / 0", "3", None),
        ("2^3", "8", None),
        ("2 ** 3", "8", None),
        ("7 // 2", "3", None),
        ("__import__('os')", "3", None),
        ("(" * 90 + "1" + ")" * 90, "1", True),
    ],
)
def test_plain_arithmetic(left: str, right: str, holds: bool | None) -> None:
    assert arithmetic(left, right) is holds


@pytest.mark.parametrize(
    ("found", "answer", "scale", "value"),
    [
        ("18", "18", 1, 1),
        (None, "18", 1, 0),
        ("17", "18", 1, 18 / 19),
        ("27", "18", 0.5, 0.5),
        ("0", "0.5", 1, 2 / 3),
        ("\\frac{1}{4}", "\\frac{1}{2}", 1, 0.8),
        ("1/0", "\\frac{1}{2}", 1, 0),
        ("(1,2)", "(1,3)", 1, (1 + 0.75) / 2),
        ("(1,2,3)", "(1,2)", 1, 0),
        ("x", "18", 1, 0),
        ("9" * 999, "1", 1, 0),
    ],
)
def test_closeness(found: str | None, answer: str, scale: float, value: float) -> None:
    assert closeness(found, answer, scale) == pytest.approx(value)


@settings(max_examples=60)
@given(
    st.lists(st.text(st.sampled_from("0123456789+-*/= \n\\{}x,.")), min_size=1, max_size=4),
    st.sampled_from(list(REWARD_WEIGHTS)),
)
def test_parts_lie_between_0_and_1_and_values_are_their_weighted_sum(completions: list[str], kind: str) -> None:
    for style, is_chain in (("equals", True), ("equals", False)):
        rule = rewards.Rule(kind, style, chain=is_chain)
        scores = rule(batch(*(("7+3*8=", "0", c) for c in completions)))
        weights = REWARD_WEIGHTS[kind]
        assert set(scores.components) == set(weights)
        for i, value in enumerate(scores.values):
            assert all(0 <= column[i] <= 1 for column in scores.components.values())
            assert value == pytest.approx(sum(weights[name] * scores.components[name][i] for name in weights))


def test_every_solution_of_the_chain_has_the_highest_reward() -> None:
    rows = chain.problems("tune", 50, seed=1)
    found = batch(*((r["question"], r["answer"], r["solution"]) for r in rows))
    for kind, weights in REWARD_WEIGHTS.items():
        assert rewards.Rule(kind, "equals", chain=True)(found).values == pytest.approx([sum(weights.values())] * 50)


@pytest.mark.parametrize("kind", list(REWARD_WEIGHTS))
def test_a_preset_says_its_weights_and_they_are_the_defaults(kind: str) -> None:
    config = compose_one("model=tiny-s", f"reward={kind}")
    assert config.reward.weights == REWARD_WEIGHTS[kind]
    rule = rewards.make(config)
    assert isinstance(rule, rewards.Rule)
    assert (rule.name, rule.kind, rule.extract, rule.chain) == (kind, kind, "equals", True)


def test_weights_and_scale_come_from_the_configuration() -> None:
    config = compose_one("model=tiny-s", "reward=dense", "reward.weights.closeness=2", "reward.scale=0.25")
    scores = rewards.make(config)(batch(CHAIN[2]))
    assert scores.values == pytest.approx([2 / (1 + 2 / 8 / 0.25) + 0.2])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["reward=structured", "reward.weights.finised=2"], "did you mean 'reward.weights.finished'?"),
        (["reward=sparse", "+reward.weights.finished=2"], "reward.kind=sparse has no such part; valid: correct"),
        (
            ["reward=structured", "reward.weights.finished=-2"],
            "reward.weights.finished=-2.0: must lie between 0 and 100",
        ),
        (["reward=sparse", "reward.weights.correct=0"], "at least one must be above 0"),
        (["reward=dense", "reward.scale=0"], "reward.scale=0.0: must lie between 0.001 and 1000"),
        (["reward=sparse", "reward.verifier_seconds=0"], "reward.verifier_seconds=0.0: must lie between"),
        (["reward=custom"], "reward.function=None: give the dotted path of a function"),
        (["reward=custom", "reward.function=f"], "reward.function=f: give the dotted path of a function"),
    ],
)
def test_mistakes_are_one_line(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_one("model=tiny-s", *overrides)
    assert says in str(caught.value)


# --- a user's own ---------------------------------------------------------------------------------------------------

OWN = """
from race_sweeps.rewards import Batch, Scores
def shortness(batch: Batch) -> list[float]:
    return [1 / (1 + len(c)) for c in batch.completions]
def detailed(batch): return Scores([1, 2], {"part": [0.5, 1]}, counts={"own/seen": 2})
def short(batch): return [1.0]
def infinite(batch): return [1.0, float("inf")]
def words(batch): return ["high", "low"]
def nothing(batch): return None
def part(batch): return Scores([1.0, 2.0], {"part": [1.0]})
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_a_users_own_reward() -> None:
    config = compose_one("model=tiny-s", "reward=custom", "reward.function=own_rewards.shortness", "reward.name=short")
    reward: Any = rewards.make(config)
    assert reward.name == "short"
    assert reward(batch(*CHAIN[:2])).values == [1 / 14, 1 / 14]
    expected = Scores([1.0, 2.0], {"part": [0.5, 1.0]}, counts={"own/seen": 2})
    assert Custom("own_rewards:detailed")(batch(*CHAIN[:2])) == expected


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("own_rewards.short", "returned values: 1 for 2 completions"),
        ("own_rewards.infinite", "returned values: inf for completion 1"),
        ("own_rewards.words", "returned values: a list; return rewards.Scores, or one number per completion"),
        ("own_rewards.nothing", "returned values: a NoneType"),
        ("own_rewards.part", "returned part: 1 for 2 completions"),
        ("own_rewards.number", "a int, not a function"),
        ("own_rewards.absent", "cannot be imported (AttributeError"),
        ("no_such_module.f", "cannot be imported (ModuleNotFoundError"),
        ("broken_rewards.f", "cannot be imported (ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_ones_own_reward(function: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        Custom(function)(batch(*CHAIN[:2]))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"reward.function={function}: ")
