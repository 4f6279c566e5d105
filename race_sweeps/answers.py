"""Final answers: where they stand in a text, and whether two are equal (math-verify underneath)."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def reference(text: str, style: str) -> str:
    """The reference answer in a data row's answer field.

    `style`: "math", the field is the answer; "hashes", what follows the last `####` (GSM8K), without thousands commas.
    Raises `ValueError` when there is none.
    """
    if style == "math":
        return text.strip()
    _, mark, answer = text.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("no final answer after '####'")
    return answer.strip().replace(",", "")


def correct(completion: str, answer: str, style: str) -> bool:
    """Whether a completion's final answer equals the reference.

    `style`: "equals", the answer is what follows the last `=`; "math", math-verify finds it (boxed first, then the
    last expression or number).
    """
    if style == "equals":
        _, mark, found = completion.rpartition("=")
        found = found.strip()
        if not mark or not found:
            return False
        if found == answer:
            return True
        if _NUMBER.fullmatch(found) and _NUMBER.fullmatch(answer):
            return float(found) == float(answer)
        completion = found
    return _verify(completion, answer)


def stated(completion: str, style: str) -> bool:
    """Whether a completion gives a final answer where the format asks for one, right or wrong: after the last `=`
    ("equals"), or in a closed, filled \\boxed{} ("math")."""
    if style == "equals":
        return bool(completion.rpartition("=")[2].strip()) and "=" in completion
    return re.search(r"\\boxed\s*{\s*[^\s}]", completion) is not None and "}" in completion.rpartition("boxed")[2]


def _verify(completion: str, answer: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for each hostile answer
    try:
        return bool(verify(_parse_reference(answer), parse(completion, raise_on_error=False), raise_on_error=False))
    except Exception:  # the text is untrusted: whatever it breaks costs that completion its reward, not the run
        return False


@lru_cache(maxsize=100_000)
def _parse_reference(answer: str) -> list[Any]:
    from math_verify import parse

    parsed = parse(f"\\boxed{{{answer}}}")
    return list(parsed)
