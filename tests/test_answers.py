"""Where a final answer stands, and when two are equal; on real reference solutions, and on wrong ones made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from race_sweeps import answers, verifier
from tests.conftest import shared


def judged(completions: list[str], references: list[str]) -> list[bool]:
    values, counts = verifier.correct(completions, references, "math")
    assert counts == {}
    return values


@pytest.mark.parametrize(
    ("completion", "answer", "style", "expected"),
    [
        ("7+3=0*8=0-2=8", "8", "equals", True),
        ("7+3=0*8=0-2=7", "8", "equals", False),
        ("7+3=0*8=0-2=08", "8", "equals", True),
        ("7+3=0*8=0-2=18", "8", "equals", False),
        ("7+3=0*8=", "8", "equals", False),
        ("7+3=0+8", "8", "equals", False),  # worth 8, but not a number as written
        ("8", "8", "equals", False),
        ("", "8", "equals", False),
        (r"So the answer is \boxed{18}.", "18", "math", True),
        (r"So the answer is \boxed{\frac{36}{2}}.", "18", "math", True),
        (r"So the answer is \boxed{-18}.", "18", "math", False),
        ("He pays $1,234 in total.", "1234", "math", True),
        (r"\boxed{\$1,\!234.50}", "1234.5", "math", True),
        ("no idea", "18", "math", False),
        ("", "18", "math", False),
        (r"\boxed{3} no, \boxed{4}", "4", "math", True),  # the last box counts
        (r"\boxed{3} no, \boxed{4}", "3", "math", False),
        (r"$x = \boxed{1}$ or $x = \boxed{-2}$", r"-2, 1", "math", True),  # but for answers of several parts
        (r"$x = \boxed{1}$ or $x = \boxed{2}$", r"-2, 1", "math", False),
        (r"\boxed{18", "18", "math", False),  # cut off
        (r"\boxed{0.5}", r"50\%", "math", True),
        (r"\boxed{51\%}", "50", "math", False),
        (r"\boxed{(C)}", r"\text{(C)}", "math", True),
        (r"\boxed{B}", r"\text{(C)}", "math", False),
        (r"\boxed{\text{evelyn}}", r"\text{Evelyn}", "math", True),
        (r"\boxed{\text{neve}}", r"\text{even}", "math", False),  # not a product of letters
        (r"\boxed{50\%}", r"50", "math", True),
        (r"\boxed{5.4\text{ cents}}", "5.4", "math", True),
        (r"\boxed{60^\circ}", "60", "math", True),
        (r"\boxed{[2, 5)}", "[2,5)", "math", True),
        (r"\boxed{(2, 5)}", "[2,5)", "math", False),
        (r"\boxed{(-\infty, 2) \cup (3, \infty)}", r"(-\infty,2)\cup(3,\infty)", "math", True),
        (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}", "math", True),
        (r"\boxed{(2, 1)}", "(1,2)", "math", False),
        (r"\boxed{\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", "math", True),
        (r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", "math", False),
        (r"\boxed{x = 5}", "5", "math", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", "math", True),
        (r"\boxed{52_9}", "52_8", "math", False),
        (r"\boxed{52_{8}}", "52_8", "math", True),
        (r"\boxed{0.3333333}", r"\frac13", "math", True),
        (r"\boxed{0.33}", r"\frac13", "math", False),
        ("3 + 4 = 7\n#### 7", "7", "math", True),
        ("3 + 4 = 8\n#### 8", "7", "math", False),
    ],
)
def test_correct(completion: str, answer: str, style: str, expected: bool) -> None:
    assert verifier.correct([completion], [answer], style) == ([expected], {})


def test_reference_of_a_row() -> None:
    assert answers.reference("She has 2 * 3 = <<2*3=6>>6.\n#### 1,006", "hashes") == "1006"
    assert answers.reference(" 42 ", "math") == "42"
    assert answers.reference(r"so $\boxed{42}$.", "math") == "42"
    with pytest.raises(ValueError, match="no final answer"):
        answers.reference("no mark", "hashes")
    with pytest.raises(ValueError, match="empty"):
        answers.reference(r"\boxed{}", "math")


def test_boxes_are_the_closed_outermost_ones() -> None:
    assert answers.boxed(r"\boxed{\frac{1}{2}} and \fbox {3} \boxed{4") == [r"\frac{1}{2}", "3"]
    assert answers.boxed(r"\boxed{\boxed{3}}") == [r"\boxed{3}"]
    assert answers.boxed(r"} \boxed{\{1, 2\}} {") == [r"\{1, 2\}"]
    assert answers.boxed(r"{\boxed{1} \boxed{2}}") == ["1", "2"]


@given(st.text(st.sampled_from(r"\boxed{}12 ,$=")))
def test_plain_text_never_raises(text: str) -> None:
    for style in ("math", "equals"):
        answers.decide(text, "12", style)
    answers.decide("12", text, "math")
    answers.parts(text)


@given(st.integers(), st.integers())
def test_numbers_are_equal_when_they_are(a: int, b: int) -> None:
    assert answers.decide(f"\\boxed{{{a:,}}}", str(b), "math") is (a == b)


# --- real reference solutions ---------------------------------------------------------------------------------------


def gsm8k() -> tuple[list[str], list[str]]:
    rows = [json.loads(line) for line in shared("gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["answer"] for row in rows], [answers.reference(row["answer"], "hashes") for row in rows]


def math500() -> tuple[list[str], list[str]]:
    rows = [json.loads(line) for line in shared("math500/test.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["solution"] for row in rows], [answers.reference(row["answer"], "math") for row in rows]


@pytest.mark.parametrize(("load", "rows"), [(gsm8k, 1319), (math500, 500)])
def test_every_reference_solution_is_right(load: Callable[[], tuple[list[str], list[str]]], rows: int) -> None:
    solutions, references = load()
    assert len(references) == rows
    forms = (
        solutions,
        references,
        [f"so $\\boxed{{{r}}}$." for r in references],
        [f"it is ${r}$." for r in references],
    )
    for completions in forms:
        values = judged(completions, references)
        assert all(values), [r for r, right in zip(references, values, strict=True) if not right]


@pytest.mark.parametrize(("load", "rows"), [(gsm8k, 1319), (math500, 500)])
def test_the_library_alone_agrees(load: Callable[[], tuple[list[str], list[str]]], rows: int) -> None:
    """Without the plain cases decided first: they only save time."""
    solutions, references = load()
    items: list[verifier.Item] = [("answer", s, r) for s, r in zip(solutions, references, strict=True)]
    assert verifier.shared().check(items).outcomes == [verifier.Outcome.RIGHT] * rows


def other_number(answer: str) -> list[str]:
    """One number of the answer, each in turn, increased by 1."""
    numbers = re.finditer(r"\d+", answer)
    return [answer[: m.start()] + str(int(m[0]) + 1) + answer[m.end() :] for m in numbers]


def other_sign(answer: str) -> list[str]:
    if len(answers.parts(answer)) > 1 or re.search(r"\\(pm|text|in\b)|=", answer):
        return []
    if answer.startswith("-"):
        return [answer[1:]]
    return [f"-({answer})" if re.search("[-+]", answer) else f"-{answer}"]


def missing_element(answer: str) -> list[str]:
    if len(answers.parts(answer)) < 2:
        return []
    close = re.search(r"(\\right)?\s*(\\\}|[\])])$", answer)
    return [answer[: answer.rindex(",")] + (close[0] if close else "")]


def no_difference(reference: str, wrong: str) -> bool:
    """Why a changed reference may be judged right: the change is one of units, or none."""
    units = re.search(r"\\(text|mbox)\{.*\}\^", reference)
    return wrong == "-0" or bool(units and reference[: units.start()] == wrong[: units.start()])


@pytest.mark.parametrize("change", [other_number, other_sign, missing_element])
@pytest.mark.parametrize("load", [gsm8k, math500])
def test_changed_references_are_wrong(
    load: Callable[[], tuple[list[str], list[str]]], change: Callable[[str], list[str]]
) -> None:
    pairs = [(reference, wrong) for reference in load()[1] for wrong in change(reference)]
    values = judged([f"so $\\boxed{{{wrong}}}$." for _, wrong in pairs], [reference for reference, _ in pairs])
    right = [pair for pair, value in zip(pairs, values, strict=True) if value]
    assert [pair for pair in right if not no_difference(*pair)] == []
