"""When two problem texts are the same problem."""

from __future__ import annotations

import hashlib
import re
import unicodedata

_LATEX_SPACE = re.compile(r"\\[,!;:\s]|\\q?quad(?![a-z])|\\(?:left|right|displaystyle)(?![a-z])|\\[()\[\]]|[~${}]")
_WORDING = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf|emph)\s*\{")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")
_PUNCTUATION = re.compile(r"[,;:!?\"'`´‘’“”]|\.(?!\d)|(?<!\d)\.(?=\D|$)")
_OPERATOR = re.compile(r"\s*([-+*/^=<>|()\[\]])\s*")
_FIGURE = re.compile(r"\[asy\].*?\[/asy\]")
_WORD = re.compile(r"\\?\w+(?:\.\d+)?|[^\w\s]")


def normalised(question: str) -> str:
    """The text without case, spacing, punctuation and LaTeX's spacing and sizing; numbers and operators are kept."""
    text = unicodedata.normalize("NFKC", question).casefold()
    text = _WORDING.sub(" {", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _THOUSANDS.sub("", _LATEX_SPACE.sub(" ", text).replace("−", "-"))
    text = _PUNCTUATION.sub(" ", _HYPHEN.sub(" ", text))
    return " ".join(_OPERATOR.sub(r"\1", text).split())


def identity(text: str) -> str:
    """Ten hex digits for a normalised question."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def share(text: str) -> float:
    """Where a normalised question falls in [0, 1), by its hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    """Runs of `n` words (operators count as words) of a normalised question, drawing code left out; none in a shorter
    one."""
    words = _WORD.findall(_FIGURE.sub(" ", text))
    return set(zip(*(words[i:] for i in range(n)), strict=False)) if len(words) >= n else set()
