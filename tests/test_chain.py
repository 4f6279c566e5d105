"""The chain data set: splits, determinism, solutions, reading of completions, and the warm start's noise."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from race_sweeps.data import chain
from race_sweeps.errors import UserError

QUESTIONS = st.from_regex(r"\A[0-9](?:[+\-*][0-9]){1,4}=\Z")


def evaluate(question: str) -> int:
    """Left to right with Python's own arithmetic, reduced once at the end."""
    value = int(question[0])
    for operator, digit in zip(question[1:-1:2], question[2:-1:2], strict=True):
        value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[operator]
    return value % 10


def test_the_documented_example() -> None:
    assert chain.problem("7+3*8-2=") == {"question": "7+3*8-2=", "answer": "8", "solution": "7+3=0*8=0-2=8"}


@pytest.mark.parametrize("text", ["", "7", "7=", "7+3", "7+3=0", "77+3=", "7/3=", "7+3*8-2= ", "٧+3="])
def test_other_text_is_no_question(text: str) -> None:
    with pytest.raises(UserError, match="for example"):
        chain.problem(text)


@given(QUESTIONS)
def test_solutions_are_self_consistent_and_reach_the_direct_value(question: str) -> None:
    row = chain.problem(question)
    found = chain.steps(row["solution"], question)
    assert len(found) == question.count("+") + question.count("-") + question.count("*")
    assert all(step.right and step.asked for step in found)
    assert chain.final_answer(row["solution"]) == row["answer"] == str(evaluate(question))
    assert len(row["solution"]) == 4 * len(found) + 1


def test_splits_are_disjoint_and_about_80_10_10() -> None:
    drawn = {split: {r["question"] for r in chain.problems(split, 1500, seed=3)} for split in chain.SPLITS}
    assert len(set.union(*drawn.values())) == sum(map(len, drawn.values()))
    rng = random.Random(0)
    there = [chain.split_of(chain.random_question(rng, 3)) for _ in range(20_000)]
    shares = {split: there.count(split) / len(there) for split in chain.SPLITS}
    assert shares == pytest.approx({"train": 0.8, "tune": 0.1, "report": 0.1}, abs=0.01)


@pytest.mark.parametrize("split", chain.SPLITS)
def test_rows_belong_to_their_split_and_alternate_in_length(split: str) -> None:
    rows = chain.problems(split, 30, seed=1, operations=(4, 2))
    assert {chain.split_of(row["question"]) for row in rows} == {split}
    assert [len(row["question"]) for row in rows] == [10, 6] * 15


def test_tune_and_report_questions_are_distinct_to_the_last_one() -> None:
    for split in ("tune", "report"):
        there = chain._capacity(split, 2)
        rows = chain.problems(split, there, seed=0, operations=(2,))
        assert len({row["question"] for row in rows}) == there
        with pytest.raises(UserError, match=f"there are {there}"):
            chain.problems(split, there + 1, seed=0, operations=(2,))


def test_capacities_of_a_length_add_up_to_all_its_questions() -> None:
    assert sum(chain._capacity(split, 2) for split in chain.SPLITS) == 10 * 30**2


def test_same_rows_in_another_process_whatever_its_hash_seed() -> None:
    code = "from race_sweeps.data import chain; print(chain.problems('tune', 40, 5), chain.problems('train', 40, 5))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{chain.problems('tune', 40, 5)} {chain.problems('train', 40, 5)}\n"}


def test_rows_never_change() -> None:
    """Published figures name these splits: other rows under the same seed would be another data set."""
    assert [row["question"] for row in chain.problems("report", 4, seed=0)] == [
        "2-8-7=",
        "1+0+7+4=",
        "4*6*6-6-3=",
        "8+4*8=",
    ]
    assert [row["question"] for row in chain.problems("train", 4, seed=0)] == [
        "6+8+8=",
        "6+7-3*1=",
        "1-5-7+5+7=",
        "4-4*5=",
    ]


def test_seeds_differ() -> None:
    assert chain.problems("train", 20, 0) != chain.problems("train", 20, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian", 5, 0), "did you mean 'train'?"),
        (("test", 5, 0), "valid: train, tune, report"),
        (("train", 0, 0), "n=0: must be at least 1"),
        (("train", 5, 0, ()), "between 1 and 4"),
        (("train", 5, 0, (5,)), "between 1 and 4"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        chain.problems(*arguments)
    assert message in str(caught.value)


# --- reading completions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7+3=0*8=0-2=8", [("7+3=0", True, True), ("0*8=0", True, True), ("0-2=8", True, True)]),
        ("7+3=1*8=8-2=6", [("7+3=1", False, True), ("1*8=8", True, True), ("8-2=6", True, True)]),
        ("7+3=0*7=0-2=8", [("7+3=0", True, True), ("0*7=0", True, False), ("0-2=8", True, True)]),
        ("7+3=0*8=", [("7+3=0", True, True)]),
        ("7+3=0;1*8=8", [("7+3=0", True, True), ("1*8=8", True, False)]),
        ("7+3=10*8=0", [("7+3=10", False, True), ("10*8=0", True, True)]),
        ("7 + 3 = 0", [("7+3=0", True, True)]),
        ("3+7=0", [("3+7=0", True, False)]),
        (
            "7+3=0*8=0-2=8+1=9",
            [("7+3=0", True, True), ("0*8=0", True, True), ("0-2=8", True, True), ("8+1=9", True, False)],
        ),
        ("=+3=0", []),
        ("7+=3", []),
        ("", []),
        ("٧+٣=٠", []),
    ],
)
def test_steps_of_a_completion(text: str, expected: list[tuple[str, bool, bool]]) -> None:
    assert [(step.text, step.right, step.asked) for step in chain.steps(text, "7+3*8-2=")] == expected


def test_without_a_question_nothing_is_asked() -> None:
    assert [(s.right, s.asked) for s in chain.steps("7+3=0*8=0")] == [(True, False), (True, False)]
    assert [(s.right, s.asked) for s in chain.steps("7+3=0*8=0", "what is it?")] == [(True, False), (True, False)]


@given(st.text(alphabet="0123456789+-*= ;x", max_size=60), st.none() | QUESTIONS)
def test_no_text_raises_and_found_steps_are_equations_of_it(text: str, question: str | None) -> None:
    for step in chain.steps(text, question):
        left, result = step.text.split("=")
        assert step.text in text.replace(" ", "")
        assert step.result == result
        if len(left) == 3 and len(result) == 1:
            assert step.right == (evaluate(left + "=") == int(result))


@pytest.mark.parametrize("text", ["1" * 200_000, "1+" * 100_000, "1+1=" * 50_000, "1 " * 100_000, " " * 200_000])
def test_long_hostile_text_is_read_in_linear_time(text: str) -> None:
    began = time.process_time()
    chain.steps(text, "1+1=")
    chain.final_answer(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "answer"),
    [("7+3=0*8=0-2=8", "8"), ("7+3=", "3"), ("the answer is 12.", "12"), ("", None), ("no number", None)],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert chain.final_answer(text) == answer


# --- the noise model ---------------------------------------------------------------------------------------------

CLEAN = chain.Noise(hard=0.0, hard_right=1.0, easy_right=1.0)


@given(QUESTIONS, st.integers())
def test_without_noise_the_solution_is_right(question: str, seed: int) -> None:
    assert chain.unreliable_solution(random.Random(seed), question, CLEAN) == chain.problem(question)["solution"]


@given(QUESTIONS, st.integers())
def test_noise_changes_results_only(question: str, seed: int) -> None:
    text = chain.unreliable_solution(random.Random(seed), question, chain.Noise(0.5, 0.3, 0.8))
    assert all(step.asked for step in chain.steps(text, question))
    assert len(text) == len(chain.problem(question)["solution"])


def test_hard_facts_have_one_fixed_wrong_digit() -> None:
    always = chain.Noise(hard=1.0, hard_right=0.0, easy_right=1.0)
    for a in range(10):
        for operator in chain.OPERATORS:
            for b in range(10):
                wrong = chain.misconception(a, operator, b, hard=1.0)
                assert wrong is not None
                assert wrong != chain.apply(a, operator, b)
                text = chain.unreliable_solution(random.Random(a), f"{a}{operator}{b}=", always)
                assert text == f"{a}{operator}{b}={wrong}"


def test_the_share_of_hard_facts_and_their_rates_are_what_was_asked() -> None:
    noise = chain.Noise(hard=0.4, hard_right=0.3, easy_right=0.9)
    facts = [(a, operator, b) for a in range(10) for operator in chain.OPERATORS for b in range(10)]
    hard = {fact for fact in facts if chain.misconception(*fact, hard=noise.hard) is not None}
    assert len(hard) / len(facts) == pytest.approx(noise.hard, abs=0.06)
    rng, right = random.Random(0), {True: 0, False: 0}
    draws = 100
    for a, operator, b in facts:
        for _ in range(draws):
            (step,) = chain.steps(chain.unreliable_solution(rng, f"{a}{operator}{b}=", noise))
            right[(a, operator, b) in hard] += step.right
    assert right[True] / (draws * len(hard)) == pytest.approx(0.3, abs=0.015)
    # A slip is a random digit, right one time in ten.
    assert right[False] / (draws * (len(facts) - len(hard))) == pytest.approx(0.9 + 0.1 / 10, abs=0.01)


def test_more_hard_facts_keep_the_hard_ones() -> None:
    for a in range(10):
        if (wrong := chain.misconception(a, "+", 3, hard=0.2)) is not None:
            assert chain.misconception(a, "+", 3, hard=0.6) == wrong
