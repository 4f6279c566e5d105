"""Final answers: where they stand in a text, and whether two are equal.

`decide` answers the plain cases (equal text, numbers, words) in microseconds. What it leaves open needs math-verify,
which untrusted text can stall or crash: `race_sweeps.verifier` runs `equal` and `holds` in workers with limits.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_DIGITS = 1000  # of a plain number; longer ones are left to the workers
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_CURRENCY = re.compile(r"([-+]?)(?:\\?\$|[€£¥])\s*")
_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_SPACE = re.compile(r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])|[~\s]")
_WORDING = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|textnormal|mathbf)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")


def reference(text: str, style: str) -> str:
    """The reference answer in a data row's answer field.

    `style`: "math", the field is the answer (a closed `\\boxed{}` in it wins); "hashes", what follows the last `####`
    (GSM8K), without thousands commas. Raises `ValueError` when there is none.
    """
    if style == "math":
        boxes = boxed(text)
        answer = boxes[-1].strip() if boxes else text.strip()
        if not answer:
            raise ValueError("the answer is empty")
        return answer
    _, mark, answer = text.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("no final answer after '####'")
    return answer.strip().replace(",", "")


def boxed(text: str) -> list[str]:
    r"""Contents of the closed `\boxed{...}` of a text, outermost ones only, in order. Linear in the text."""
    opened: list[tuple[int, bool]] = []  # where the content of each open brace starts, and whether it is a box's
    boxes: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        if match[1] or match[0] == "{":
            opened.append((match.end(), match[1] is not None))
        elif match[0] == "}" and opened:
            start, box = opened.pop()
            if box:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, match.start()))
    return [text[start:end] for start, end in boxes]


def final(completion: str, style: str) -> str | None:
    r"""The final answer as the completion marks it: "equals", what follows the last `=`; "math", the last closed
    `\boxed{}`, else what follows the last `####` on its line. None where nothing is marked."""
    if style == "equals":
        _, mark, found = completion.rpartition("=")
        return found.strip() if mark and found.strip() else None
    if boxes := boxed(completion):
        return boxes[-1].strip()
    _, mark, found = completion.rpartition("####")
    found = found.strip().partition("\n")[0].strip()
    return found if mark and found else None


def decide(completion: str, answer: str, style: str) -> bool | None:
    """Whether a completion's final answer equals the reference, where that is plain; None where it takes math-verify.

    `style`: see `final`. With "equals" a number is only ever equal to a number as written.
    """
    found = final(completion, style)
    if found is None:
        if style == "equals" or not completion.strip():
            return False
        found = completion
    if found == answer or same_text(found, answer):
        return True
    wanted, number = plain_number(answer), plain_number(found)
    if wanted is not None and number is not None:
        return round(wanted, 6) == round(number, 6)  # math-verify's tolerance for decimal fractions
    if style == "equals" and wanted is not None:
        return False
    words, said = _words(answer), _words(found)
    if words is not None and said is not None and (found is not completion or len(said) <= len(words)):
        return words == said
    return None


def same_text(found: str, answer: str) -> bool:
    """Equal but for LaTeX spacing, sizing, `\\text`, degree signs, thousands commas, a final full stop."""
    return len(found) <= 2 * len(answer) + 100 and _normal(found) == _normal(answer)


def plain_number(text: str) -> Fraction | None:
    """The value of a plain decimal number (currency sign and thousands commas allowed); None for anything else."""
    if len(text) > MAX_DIGITS:
        return None
    text = _CURRENCY.sub(r"\1", text.strip().strip("$").strip().replace(r",\!", ","))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def parts(answer: str) -> list[str]:
    """The elements of a tuple, list, set or interval, split at its top-level commas; the answer itself otherwise."""
    text = _normal(answer)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        text = text[1:-1]
    elif text.startswith(r"\{") and text.endswith(r"\}"):
        text = text[2:-2]
    found, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append(text[start:place])
            start = place + 1
    return [*found, text[start:]]


@lru_cache(maxsize=10_000)
def _normal(answer: str) -> str:
    text = _WORDING.sub(r"\1", answer.strip().strip("$"))
    if _THOUSANDS.fullmatch(text := text.replace(r",\!", ",")):
        text = text.replace(",", "")
    text = _SPACE.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = re.sub(r"\^(?:\\circ|\{\\circ\})|\\degree|°", "", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    return text.removesuffix(".")


def _words(answer: str) -> str | None:
    r"""Text answers (`\text{Evelyn}`, `\text{(C)}`, `even`), case folded; None for mathematics."""
    text = answer.strip().strip("$").strip()
    wrapped = _WORDING.fullmatch(text)
    text = (wrapped[1] if wrapped else text).strip().removesuffix(".")
    text = unicodedata.normalize("NFKC", text.removeprefix("(").removesuffix(")")).casefold()
    shortest = 1 if wrapped else 3  # without \text, `ab` may be a product
    return text if len(text) >= shortest and _WORDS.fullmatch(text) else None


# --- math-verify: only in a process that may be lost ----------------------------------------------------------------


def equal(completion: str, answer: str) -> bool:
    """Whether a completion's final answer equals the reference, by math-verify: the last `\\boxed{}`, or all of them
    for a reference of several parts; without a box the last expression or number. May stall or exhaust memory."""
    _quiet()
    from math_verify import verify

    boxes = boxed(completion)
    marked = final(completion, "math")
    candidates = [completion] if marked is None else [f"\\boxed{{{marked}}}"]
    if len(boxes) > 1 and len(parts(answer)) > 1:
        candidates.append("\\boxed{" + ",".join(dict.fromkeys(boxes)) + "}")
    gold = _parse_reference(answer)
    return any(verify(gold, _parse(text), timeout_seconds=None) for text in candidates)


def holds(left: str, right: str) -> bool | None:
    """Whether an equation without unknowns is true; None when it has unknowns or is not mathematics. May stall."""
    _quiet()
    from math_verify import verify

    sides = [_parse(f"${side}$") for side in (left, right)]
    if not all(side and not isinstance(side[0], str) and not side[0].free_symbols for side in sides):
        return None
    return bool(verify(sides[0], sides[1], timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))  # its own time limit needs signals, and threads change its results


@lru_cache(maxsize=10_000)
def _parse_reference(answer: str) -> list[Any]:
    return _parse(f"\\boxed{{{answer}}}")


@lru_cache(maxsize=1)
def _quiet() -> None:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for each hostile answer
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
