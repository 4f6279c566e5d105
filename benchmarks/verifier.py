"""The verifier against a serial loop over the same library, and hostile text through it.

    python -m benchmarks.verifier [HOSTILE ITEMS]

Prints the pool's throughput as a ratio to the serial loop's in the same run (blocks alternate), for sound answers that
need math-verify; then sends generated hostile completions through it and prints what became of them, the longest wait
and the most memory that the pool held.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import threading
import time
from collections import Counter

import psutil

from race_sweeps import answers
from race_sweeps.verifier import Item, Outcome, Verifier

BLOCKS, BLOCK = 5, 400


def sound(rng: random.Random) -> Item:
    """A right answer that is not written like its reference."""
    a, b, c = (rng.randrange(2, 50) for _ in range(3))
    forms = [
        (rf"so it is $\boxed{{\frac{{{a * b}}}{{{b * c}}}}}$", rf"\frac{{{a}}}{{{c}}}"),
        (rf"\boxed{{x^2 - {a * a}}}", rf"(x - {a})(x + {a})"),
        (rf"\boxed{{\left({a}+1, \sqrt{{{b * b}}}\right)}}", f"({a + 1}, {b})"),
        (rf"\boxed{{{a}\sqrt{{{b * b * 2}}}}}", rf"{a * b}\sqrt{{2}}"),
        (rf"\boxed{{[{a}, \infty)}}", rf"[\frac{{{2 * a}}}{{2}}, \infty)"),
    ]
    text, reference = rng.choice(forms)
    return ("answer", text, reference)


_ATOMS = ["1", "x", "9" * 50, r"\pi", r"\infty", "e", "0", "-", "i", r"\text{no}", "\ud800", "\0", "٣", "∞", "½"]
_WRAPPERS = [
    r"\frac{%s}{%s}", r"\sqrt[%s]{%s}", "%s^{%s}", r"\left(%s\right.%s", "{%s}!%s", r"\sum_{n=%s}^{%s} n!",
    r"\int_{%s}^{%s} x^x dx", r"\begin{pmatrix} %s & %s", r"\log_{%s}{%s}", "%s,%s", "%s=%s", r"\lim_{x \to %s} %s",
    r"\binom{%s}{%s}", r"%s \cup %s", "{{%s}%s", r"\{%s, %s\}", "|%s|%s", r"%s \pmod{%s}", "%s < %s", r"%s\%% %s",
]  # fmt: skip


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_ATOMS)
    parts = rng.choice(_WRAPPERS) % (_expression(rng, depth - 1), _expression(rng, rng.randrange(depth)))
    return parts if rng.random() < 0.9 else parts[: rng.randrange(len(parts) + 1)]


def _killer(rng: random.Random) -> str:
    n = rng.randrange(3, 10)
    return rng.choice(
        [
            rf"\boxed{{{n}^{{{n}^{{{n}^{{{n}}}}}}}}}",
            rf"\boxed{{{n * 10**7}!}}",
            r"\boxed{" + str(n) * 10**6 + "}",
            r"\boxed{" + "(" * (n * 1000) + "1" + ")" * (n * 1000) + "}",
            r"\boxed{" * (n * 1000),
            rng.choice(["=", "$", "{", "\\", "7 ", "1,", "**"]) * (n * 100_000),
            "".join(chr(rng.randrange(0x110000)) for _ in range(1000)),
        ]
    )


def hostile(n: int, seed: int) -> list[tuple[Item, bool]]:
    """`n` items, and whether each is a sound one: 20% sound, 5% built to stall the library, the rest random
    mathematics, mostly malformed."""
    rng = random.Random(seed)
    items: list[tuple[Item, bool]] = []
    for _ in range(n):
        kind = rng.random()
        if kind < 0.2:
            items.append((sound(rng), True))
        elif kind < 0.25:
            items.append((("answer", _killer(rng), str(rng.randrange(10**9))), False))
        else:
            text = rf"\boxed{{{_expression(rng, rng.randrange(1, 6))}}}"
            items.append((("answer", text, rng.choice(["1", r"\frac{1}{2}", "x+1", "(1, 2)"])), False))
    return items


def throughput(pool: Verifier) -> None:
    rng = random.Random(0)
    blocks = [list(dict.fromkeys(sound(rng) for _ in range(BLOCK))) for _ in range(BLOCKS)]
    pool.check(blocks[0])
    ratios = []
    for items in blocks:
        started = time.perf_counter()
        serial = [answers.equal(text, reference) for _, text, reference in items]
        between = time.perf_counter()
        pooled = pool.check(items).outcomes
        ended = time.perf_counter()
        assert pooled == serial, "the pool and the serial loop disagree"
        ratios.append((between - started) / (ended - between))
    print(
        f"verifier: {statistics.median(ratios):.2f} of a serial loop's throughput with {pool.workers} workers on "
        f"{len(os.sched_getaffinity(0))} CPUs (blocks {min(ratios):.2f} to {max(ratios):.2f}; "
        f"{(between - started) / len(items) * 1000:.2f} ms an item in the serial loop)"
    )


class _Memory(threading.Thread):
    """The most resident memory of this process's children, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.05):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.most = max(self.most, total)


def endure(pool: Verifier, n: int) -> None:
    items = hostile(n, seed=0)
    memory = _Memory()
    memory.start()
    started = time.perf_counter()
    checked = pool.check([item for item, _ in items])
    seconds = time.perf_counter() - started
    memory.done.set()
    lost = [outcome for outcome, (_, fine) in zip(checked.outcomes, items, strict=True) if fine and outcome != 1]
    assert len(checked.outcomes) == n
    assert not lost, f"{len(lost)} sound answers lost"
    print(
        f"hostile: {n} items in {seconds:.0f} s: "
        + ", ".join(f"{count} {outcome.name.lower()}" for outcome, count in sorted(Counter(checked.outcomes).items()))
        + f"; {sum(fine for _, fine in items)} sound ones among them all right; at most {memory.most / 2**20:.0f} MiB "
        f"in the pool's processes (counting shared pages in each); time limit {pool.seconds:g} s of CPU an item"
    )
    assert Outcome.RIGHT in checked.outcomes


def main(items: int = 1000) -> None:
    pool = Verifier(seconds=1.0)
    try:
        throughput(pool)
        endure(pool, items)
    finally:
        pool.close()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
