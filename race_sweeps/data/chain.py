"""Chained arithmetic: a procedural data set for the embedded tiny policies. No torch, no files, no network.

A problem is 1 to 4 operations (+ - *) on single digits, applied left to right modulo 10:

    question  7+3*8-2=          (2k + 2 characters for k operations)
    solution  7+3=0*8=0-2=8     (4k + 1 characters; each result is the next step's left operand)
    answer    8                 (the last number of the solution)

Splits are decided by a hash of the question's text, so they stay disjoint whatever the seeds; all draws go through
`random.Random.random`, the one method whose stream Python promises to keep between versions.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from race_sweeps.errors import UserError, choices

MODULUS = 10
OPERATORS = "+-*"
MAX_OPERATIONS = 4
SPLITS = ("train", "tune", "report")
# Shares of the questions: 80% to train on, 10% to choose settings with, 10% for figures that are reported.
_BUCKETS = ("train",) * 8 + ("tune", "report")

Problem = dict[str, str]
"""A row: `question`, `answer`, `solution` (formats above)."""


def apply(left: int, operator: str, right: int) -> int:
    """`left operator right` modulo 10, in 0..9."""
    if operator == "+":
        return (left + right) % MODULUS
    if operator == "-":
        return (left - right) % MODULUS
    return (left * right) % MODULUS


def split_of(question: str) -> str:
    """The split a question belongs to."""
    return _BUCKETS[int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % len(_BUCKETS)]


def problem(question: str) -> Problem:
    """The row of a question; `UserError` if the text isn't a question of this data set."""
    operations = _operations(question)
    if operations is None:
        raise UserError(f"question {question!r}: must be digits joined by + - *, then '=', for example 7+3*8-2=")
    value = int(question[0])
    solution = question[0]
    for operator, right in operations:
        value = apply(value, operator, right)
        solution += f"{operator}{right}={value}"
    return {"question": question, "answer": str(value), "solution": solution}


def problems(split: str, n: int, seed: int, operations: Sequence[int] = (2, 3, 4)) -> list[Problem]:
    """`n` problems of a split; row i has `operations[i % len(operations)]` operations.

    `train` draws with replacement; the questions of `tune` and `report` are distinct. The same arguments give the same
    rows in every process, on every platform. `UserError` for an unknown split, a number of operations outside 1..4, or
    more distinct questions than there are.
    """
    if split not in SPLITS:
        raise UserError(f"chain split {split!r}: {choices(split, SPLITS)}")
    if n < 1:
        raise UserError(f"chain n={n}: must be at least 1")
    if not operations or any(not 1 <= k <= MAX_OPERATIONS for k in operations):
        raise UserError(f"chain operations={list(operations)}: give numbers between 1 and {MAX_OPERATIONS}")
    counts = [operations[i % len(operations)] for i in range(n)]
    distinct = split != "train"
    if distinct:
        for k in sorted(set(operations)):
            _check_capacity(split, k, counts.count(k))
    rng = random.Random(f"chain {split} {seed}")
    seen: set[str] = set()
    rows = []
    for k in counts:
        question = random_question(rng, k)
        while split_of(question) != split or question in seen:
            question = random_question(rng, k)
        if distinct:
            seen.add(question)
        rows.append(problem(question))
    return rows


def random_question(rng: random.Random, operations: int) -> str:
    """A question drawn uniformly among all of its length, whatever their split."""
    text = str(_below(rng, MODULUS))
    for _ in range(operations):
        text += OPERATORS[_below(rng, len(OPERATORS))] + str(_below(rng, MODULUS))
    return text + "="


# --- reading completions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One equation found in a completion.

    `right`: its arithmetic holds modulo 10. `asked`: it is the step the question asks for at this place, going on from
    the result written just before, right or wrong (always False where no question was given).
    """

    text: str
    result: str
    right: bool
    asked: bool


# The look-behind keeps a match from starting inside a number, which also keeps the scan linear in hostile text.
_EQUATION = re.compile(r"(?<![0-9])([0-9]+) *([+\-*]) *([0-9]+) *= *([0-9]+)")


def steps(solution_text: str, question: str | None = None) -> list[Step]:
    """The step equations of a completion, in order. Anything that isn't one is passed over; no text raises.

    >>> [(s.text, s.right) for s in steps("7+3=0*8=1-2=")]
    [('7+3=0', True), ('0*8=1', False)]
    """
    asked = _operations(question) if question is not None else None
    left = question[0] if question and asked else ""
    found: list[Step] = []
    start = 0
    while match := _EQUATION.search(solution_text, start):
        a, operator, b, result = match.groups()
        # Residues depend on the last digits only: no conversion of numbers thousands of digits long.
        right = result == str(apply(int(a[-1]), operator, int(b[-1])))
        place = len(found)
        due = (left, asked[place][0], str(asked[place][1])) if asked and place < len(asked) else None
        found.append(Step(f"{a}{operator}{b}={result}", result, right, asked=(a, operator, b) == due))
        left = result
        start = match.start(4)
    return found


def final_answer(solution_text: str) -> str | None:
    """The last number of a completion, as written; None where there is none."""
    numbers = re.findall("[0-9]+", solution_text)
    return numbers[-1] if numbers else None


# --- the warm start's noise --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """How unreliable the author of the warm-start text is.

    A *fact* is one `a op b` (300 of them). A share `hard` of the facts, fixed by a hash, is right only with probability
    `hard_right`, and otherwise given the fact's own fixed wrong digit: a misconception, which sampling can escape and
    reinforcement can correct. The other facts are right with probability `easy_right`, and otherwise a random digit.
    """

    hard: float
    hard_right: float
    easy_right: float


def misconception(left: int, operator: str, right: int, hard: float) -> int | None:
    """The digit usually written for a hard fact, never the right one; None for an easy fact."""
    digest = hashlib.sha256(f"fact {left}{operator}{right}".encode()).digest()
    if int.from_bytes(digest[:4], "big") >= hard * 2**32:
        return None
    return (apply(left, operator, right) + 1 + digest[4] % (MODULUS - 1)) % MODULUS


def unreliable_solution(rng: random.Random, question: str, noise: Noise) -> str:
    """A solution as an unreliable author writes it: right form, wrong facts, each step going on from the last result.

    Two draws of `rng` a step, whatever they decide, so texts differ in their results only where the noise does.
    """
    operations = _operations(question)
    if operations is None:
        raise UserError(f"question {question!r}: must be digits joined by + - *, then '=', for example 7+3*8-2=")
    value = int(question[0])
    text = question[0]
    for operator, right in operations:
        wrong = _misconceptions(noise.hard)[value, operator, right]
        luck, slip = rng.random(), _below(rng, MODULUS)
        if wrong is None:
            value = apply(value, operator, right) if luck < noise.easy_right else slip
        else:
            value = apply(value, operator, right) if luck < noise.hard_right else wrong
        text += f"{operator}{right}={value}"
    return text


# --- helpers -----------------------------------------------------------------------------------------------------


def _below(rng: random.Random, n: int) -> int:
    return int(rng.random() * n)


def _operations(question: str) -> list[tuple[str, int]] | None:
    """The (operator, right operand) pairs of a question; None for other text."""
    if not re.fullmatch(r"[0-9](?:[+\-*][0-9])+=", question):
        return None
    return [(question[i], int(question[i + 1])) for i in range(1, len(question) - 1, 2)]


@cache
def _misconceptions(hard: float) -> dict[tuple[int, str, int], int | None]:
    return {
        (a, operator, b): misconception(a, operator, b, hard)
        for a in range(MODULUS)
        for operator in OPERATORS
        for b in range(MODULUS)
    }


def _check_capacity(split: str, operations: int, wanted: int) -> None:
    total = MODULUS * (MODULUS * len(OPERATORS)) ** operations
    if wanted > 0.8 * total * _BUCKETS.count(split) / len(_BUCKETS):  # near enough to the limit to count exactly
        there = _capacity(split, operations)
        if wanted > there:
            raise UserError(
                f"chain split {split!r}: {wanted} distinct questions of {operations} operations asked, there are "
                f"{there}; ask fewer, or allow more operations"
            )


@cache
def _capacity(split: str, operations: int) -> int:
    """Questions of a length in a split, counted (at most 8.1 million are looked at)."""
    texts = [str(digit) for digit in range(MODULUS)]
    for _ in range(operations - 1):
        texts = [f"{text}{operator}{digit}" for text in texts for operator in OPERATORS for digit in range(MODULUS)]
    ends = [f"{operator}{digit}=" for operator in OPERATORS for digit in range(MODULUS)]
    return sum(split_of(text + end) == split for text in texts for end in ends)
