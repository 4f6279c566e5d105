"""Rewards by rule: no model reads the completion, so they cost no FLOPs.

    sparse          correct
    structured      correct + answered + stepwise + finished
    dense           correct + closeness + answered + finished
    dense_verifier  correct + equations + answered

Every part lies in [0, 1]; a reward is the weighted sum of its kind's parts.

    correct    the final answer equals the reference
    closeness  1 when correct; else how near the marked answer is, element by element: 1 / (1 + |error| / s) for numbers
               with s = scale x max(1, |reference|), 1 for equal text, 0 otherwise, for another number of elements, and
               where no answer is marked
    answered   one final answer is marked as the prompt asks (`\\boxed{}`; for chains, what follows the last `=`)
    stepwise   chains: share of the question's operations worked out in order; else 1 when text precedes the answer
    finished   not cut off at the length limit
    equations  share of the working's equations that hold. Chains: of the steps asked for or written, whichever are
               more. Else: of the checkable ones, those between two expressions without unknowns ("a = b = c" is two);
               equal text on both sides is no working and does not count. 0 where there is none
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise

from race_sweeps import answers, verifier
from race_sweeps.config import REWARD_WEIGHTS
from race_sweeps.data import chain
from race_sweeps.rewards.base import Batch, Scores

MAX_EQUATIONS = 64  # of one completion; later ones are not looked at
SIDE = 200  # characters of an equation's side that are looked at


@dataclass(frozen=True)
class Rule:
    """The reward of a `kind`. `extract`: where the final answer stands (`answers.final`); `chain`: completions are
    chained arithmetic; `weights`: of its parts, those of `config.REWARD_WEIGHTS` where not given; `scale`: relative
    error at which closeness is 1/2; `seconds`, `memory` (bytes): the verifier's limits per item."""

    kind: str
    extract: str = "math"
    chain: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    seconds: float = verifier.CPU_SECONDS
    memory: int = verifier.MEMORY
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.kind)

    def __call__(self, batch: Batch) -> Scores:
        weights = {**REWARD_WEIGHTS[self.kind], **self.weights}
        counts: Counter[str] = Counter()
        parts: dict[str, list[float]] = {}
        for part in weights:
            parts[part] = _PARTS[part](self, batch, parts, counts)
        values = [
            sum(w * p for w, p in zip(weights.values(), row, strict=True)) for row in zip(*parts.values(), strict=True)
        ]
        return Scores(values, parts, counts=dict(counts))

    @property
    def verifier(self) -> verifier.Verifier:
        return verifier.shared(self.seconds, self.memory)


Sparse = partial(Rule, "sparse")
Structured = partial(Rule, "structured")
Dense = partial(Rule, "dense")
DenseVerifier = partial(Rule, "dense_verifier")

_Part = Callable[[Rule, Batch, dict[str, list[float]], "Counter[str]"], list[float]]


def _correct(rule: Rule, batch: Batch, _: dict[str, list[float]], counts: Counter[str]) -> list[float]:
    found, events = verifier.correct(batch.completions, batch.references, rule.extract, rule.verifier)
    counts.update(events)
    return [float(right) for right in found]


def _closeness(rule: Rule, batch: Batch, parts: dict[str, list[float]], _: Counter[str]) -> list[float]:
    rows = zip(batch.completions, batch.references, parts["correct"], strict=True)
    return [1.0 if right else closeness(answers.final(c, rule.extract), r, rule.scale) for c, r, right in rows]


def _answered(rule: Rule, batch: Batch, _: dict[str, list[float]], __: Counter[str]) -> list[float]:
    if rule.extract == "equals":
        return [float(answers.final(completion, rule.extract) is not None) for completion in batch.completions]
    return [
        float(answers.final(completion, rule.extract) is not None and len(answers.boxed(completion)) <= 1)
        for completion in batch.completions
    ]


def _stepwise(rule: Rule, batch: Batch, _: dict[str, list[float]], __: Counter[str]) -> list[float]:
    if rule.chain:
        rows = zip(batch.questions, batch.completions, strict=True)
        return [sum(s.asked for s in chain.steps(c, q)) / max(1, _operations(q)) for q, c in rows]
    heads = (re.split(r"\\boxed\b|####", completion, maxsplit=1) for completion in batch.completions)
    return [float(len(head) > 1 and re.search(r"\w", head[0]) is not None) for head in heads]


def _finished(rule: Rule, batch: Batch, _: dict[str, list[float]], __: Counter[str]) -> list[float]:
    return [float(not cut) for cut in batch.truncated]


def _equations(rule: Rule, batch: Batch, _: dict[str, list[float]], counts: Counter[str]) -> list[float]:
    if rule.chain:
        values = []
        for question, completion in zip(batch.questions, batch.completions, strict=True):
            steps = chain.steps(completion, question)
            values.append(sum(s.right and s.asked for s in steps) / max(1, len(steps), _operations(question)))
        return values
    found = [equations(completion) for completion in batch.completions]
    known = {pair: arithmetic(*pair) for pairs in found for pair in pairs}
    open_ = [pair for pair, verdict in known.items() if verdict is None]
    if open_:
        checked = rule.verifier.check([("equation", *pair) for pair in open_])
        counts.update(checked.counts)
        undecided = verifier.Outcome.UNDECIDED
        for pair, outcome in zip(open_, checked.outcomes, strict=True):
            known[pair] = None if outcome is undecided else outcome is verifier.Outcome.RIGHT
    values = []
    for pairs in found:
        verdicts = [known[pair] for pair in pairs if known[pair] is not None]
        values.append(sum(map(bool, verdicts)) / len(verdicts) if verdicts else 0.0)
    return values


_PARTS: dict[str, _Part] = {
    "correct": _correct,
    "closeness": _closeness,
    "answered": _answered,
    "stepwise": _stepwise,
    "finished": _finished,
    "equations": _equations,
}


def _operations(question: str) -> int:
    return sum(question.count(sign) for sign in chain.OPERATORS)


# --- closeness ----------------------------------------------------------------------------------------------------


def closeness(found: str | None, answer: str, scale: float) -> float:
    """How near an answer is to the reference, in [0, 1] (see above)."""
    if found is None:
        return 0.0
    wanted, given = answers.parts(answer), answers.parts(found)
    if len(wanted) != len(given):
        return 0.0
    return sum(_near(a, b, scale) for a, b in zip(wanted, given, strict=True)) / len(wanted)


_FRACTION = re.compile(r"(-?)\\frac\{(-?\d{1,100})\}\{(-?\d{1,100})\}|(-?)(\d{1,100})/(\d{1,100})")


def _number(text: str) -> Fraction | None:
    if match := _FRACTION.fullmatch(text.strip()):
        sign, top, bottom = match.group(1, 2, 3) if match[2] else match.group(4, 5, 6)
        return Fraction(int(sign + "1") * int(top), int(bottom)) if int(bottom) else None
    return answers.plain_number(text)


def _near(wanted: str, given: str, scale: float) -> float:
    if answers.same_text(given, wanted):
        return 1.0
    a, b = _number(wanted), _number(given)
    if a is None or b is None:
        return 0.0
    return float(1 / (1 + abs(a - b) / (Fraction(scale) * max(Fraction(1), abs(a)))))


# --- equations of the working ------------------------------------------------------------------------------------

_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}
_LATEX |= {r"\left": "", r"\right": "", r"\$": "", "$": "", r"\(": "", r"\)": "", r"\[": "", r"\]": "", r"\,": ""}
_REWRITE = re.compile("|".join(re.escape(key) for key in sorted(_LATEX, key=len, reverse=True)))
_ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")  # GSM8K's calculator marks
_SIDE = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+|[-+*/^()\s]|\\[dt]?frac|\\sqrt|[{}])"
_LEFT, _RIGHT = re.compile(_SIDE + r"+\Z"), re.compile(_SIDE + "+")
_OPERATOR = re.compile(r"[-+*/^]|\\")


def equations(completion: str) -> list[tuple[str, str]]:
    """The equations of a completion whose two sides look like arithmetic, at most `MAX_EQUATIONS`, in order."""
    found: list[tuple[str, str]] = []
    for line in _ANNOTATION.sub("", completion).splitlines():
        if "=" not in line:
            continue
        chunks = _REWRITE.sub(lambda match: _LATEX[match[0]], line).split("=")
        for before, after in pairwise(chunks):
            left, right = _trailing(before[-SIDE:]), _leading(after[:SIDE])
            if left and right and left != right and (_OPERATOR.search(left) or _OPERATOR.search(right)):
                found.append((left, right))
                if len(found) == MAX_EQUATIONS:
                    return found
    return found


def _trailing(text: str) -> str:
    match = _LEFT.search(text)
    if match is None:
        return ""
    side, before = match[0].strip(), text[: match.start()].rstrip()
    if match[0][:1].strip() and before[-1:].isalnum():  # `2x`, `f(2)`: goes on to the left
        return ""
    if side[:1] in ("+", "*", "/", "^") or (side[:1] == "-" and before[-1:].isalnum()):
        return ""
    return _balanced(side)


def _leading(text: str) -> str:
    match = _RIGHT.match(text)
    if match is None:
        return ""
    after = text[match.end() :]
    side = match[0]
    if after[:1].isalpha() and not side[-1:].isspace():  # `5x`
        return ""
    side = side.strip()
    if side[-1:] in tuple("+-*/^") or after[:1] == "\\":  # `2 + x`
        return ""
    return _balanced(side.rstrip("(").strip())


def _balanced(side: str) -> str:
    right = side.count("(") == side.count(")") and side.count("{") == side.count("}")
    return side if right and re.search(r"\d", side) else ""


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(left: str, right: str) -> bool | None:
    """Whether an equation of decimal numbers, + - * / and parentheses holds, to the decimals that a side is written
    with; None for anything else."""
    try:
        a, b = (_value(ast.parse(_plain(side), mode="eval").body) for side in (left, right))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return a == b or _rounded(a, b, right) or _rounded(b, a, left)


def _plain(side: str) -> str:
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", side).strip()
    if not re.fullmatch(r"[\d.+\-*/() ]+", plain) or "**" in plain or "//" in plain:
        raise ValueError(side)
    return re.sub(r"\b0+(?=\d)", "", plain)  # Python refuses leading zeros


def _rounded(value: Fraction, other: Fraction, written: str) -> bool:
    """Whether `other`, written as a plain decimal, is `value` rounded to its decimals."""
    decimals = re.fullmatch(r"-?[\d,]*\.(\d+)", written.strip())
    return decimals is not None and round(value, len(decimals[1])) == other


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(repr(node.value))
    raise ValueError(ast.dump(node))
