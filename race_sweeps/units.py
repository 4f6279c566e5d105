"""Numbers with units, for people."""

from __future__ import annotations


def flops(value: float) -> str:
    """`1.23 TFLOP`: three significant digits and the largest fitting prefix."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}FLOP"
        value /= 1000
    return f"{value:.3g} YFLOP"


def count(value: float) -> str:
    """`12.3k`, `4.56M`: three significant digits."""
    for suffix in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}T"
