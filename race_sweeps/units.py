"""Numbers with units, for people."""

from __future__ import annotations

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def flops(value: float) -> str:
    """Three significant digits and a unit chosen by size: `flops(4e11)` is "400 GFLOP"."""
    return f"{_scaled(value, ' ')}FLOP"


def count(value: float) -> str:
    """Three significant digits and a suffix: `count(12345)` is "12.3k"."""
    return _scaled(value, "")


def _scaled(value: float, space: str) -> str:
    rounded = float(f"{value:.3g}")
    power = 0
    while abs(rounded) >= 1000 and power < len(_PREFIXES) - 1:
        rounded /= 1000
        power += 1
    return f"{rounded:.3g}{space}{_PREFIXES[power]}"
