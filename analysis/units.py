"""Numbers as people read them."""

from __future__ import annotations

import math

from race_sweeps import units

NONE = "–"


def flops_text(flops: float | None) -> str:
    """`race_sweeps.units.flops`; a dash where there is no number."""
    return NONE if flops is None or not math.isfinite(flops) else units.flops(flops)


def fixed(value: float | None, digits: int = 3) -> str:
    """`value` with that many decimals; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """Like `fixed`, with the sign written out."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:+.{digits}f}".replace("-", "−")


def percent(share: float | None, digits: int = 1) -> str:
    """A signed relative deviation: `percent(0.0123)` is "+1.2%"."""
    return NONE if share is None or not math.isfinite(share) else signed(share * 100, digits) + "%"


def p_text(p: float | None) -> str:
    """A p value with three decimals, or "< 0.001"."""
    if p is None or not math.isfinite(p):
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def seconds_text(seconds: float | None) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def printable(text: str) -> str:
    """`text` without control characters: a name from a file must not steer the terminal that shows it."""
    return "".join(c if c.isprintable() else "�" for c in text)
