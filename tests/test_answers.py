"""Where a final answer stands, and when two are equal."""

from __future__ import annotations

import pytest

from race_sweeps import answers, verifier


@pytest.mark.parametrize(
    ("completion", "answer", "style", "expected"),
    [
        ("7+3=0*8=0-2=8", "8", "equals", True),
        ("7+3=0*8=0-2=7", "8", "equals", False),
        ("7+3=0*8=0-2=08", "8", "equals", True),
        ("7+3=0*8=0-2=18", "8", "equals", False),
        ("7+3=0*8=", "8", "equals", False),
        ("8", "8", "equals", False),
        ("", "8", "equals", False),
        (r"So the answer is \boxed{18}.", "18", "math", True),
        (r"So the answer is \boxed{\frac{36}{2}}.", "18", "math", True),
        (r"So the answer is \boxed{-18}.", "18", "math", False),
        ("He pays $1,234 in total.", "1234", "math", True),
        ("no idea", "18", "math", False),
        ("", "18", "math", False),
    ],
)
def test_correct(completion: str, answer: str, style: str, expected: bool) -> None:
    assert verifier.correct([completion], [answer], style) == ([expected], {})


def test_reference_of_a_gsm8k_row() -> None:
    assert answers.reference("She has 2 * 3 = <<2*3=6>>6.\n#### 1,006", "hashes") == "1006"
    assert answers.reference(" 42 ", "math") == "42"
    with pytest.raises(ValueError, match="no final answer"):
        answers.reference("no mark", "hashes")
