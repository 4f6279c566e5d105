"""IsoFLOP analysis of any table: an optimum per budget, and the power law across budgets.

Each budget's values are a smooth curve in log x with one extremum (Hoffmann et al. 2022, "Training compute-optimal
large language models", approach 2). A parabola is biased where the curve is skewed, so `analysis.optimum` takes a
higher degree where the data ask for it. Published tables carry budgets that differ by a few per cent within one curve,
rows that were misread, and curves whose minimum was never reached; each is found and told, none is silently used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from analysis.optimum import LEVEL, NO_OPTIMUM, Curve, Optimum, best_degree, distinct, locate

Array = NDArray[np.float64]
Scale = Literal["log", "logit"]

OUTLIER = 0.01  # family-wise level of the outlier test within one budget
LEAST = 3  # losses are skewed in log x (docs/LOG.md: coverage by degree)
HIGHER_AT = 0.10
SMALLEST_GAP = 0.01  # budgets closer than 1% are never told apart
WIDEST = math.log(2)  # a group of budgets wider than a factor of 2 is no IsoFLOP curve


class Unclustered(ValueError):
    """Budgets that form no groups: `low` to `high` without a gap."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(f"budgets from {low:.3g} to {high:.3g} follow each other without a gap")
        self.low, self.high = low, high


@dataclass(frozen=True)
class Isoflop:
    """One budget: `budget` is the geometric mean of its rows' budgets, `spread` their largest ratio less 1. `optimum`
    on the transformed scale; `x`, `low`, `high` on that of the table. `value`: of the fitted curve at the optimum.
    `outliers`: indices of flagged rows, left out of the fit. `degree` 0: no fit."""

    budget: float
    spread: float
    rows: tuple[int, ...]
    outliers: tuple[int, ...]
    places: int
    degree: int
    optimum: Optimum
    x: float
    low: float
    high: float
    value: float
    value_error: float
    curve: Curve | None


@dataclass(frozen=True)
class PowerLaw:
    """log x (or logit x) of the optimum = intercept + exponent * ln C, by random-effects meta-regression over `budgets`
    budgets. `tau`: spread between budgets beyond their own errors."""

    exponent: float
    low: float
    high: float
    error: float
    intercept: float
    tau: float
    budgets: int


@dataclass(frozen=True)
class Saturation:
    """value = limit + scale * (C / reference)^-exponent through the optimal values; interval of the exponent by its
    profile. `slope`: change of the value per factor of ten in C, as a straight line."""

    limit: float
    scale: float
    exponent: float
    low: float
    high: float
    reference: float
    slope: float


@dataclass(frozen=True)
class Analysis:
    """Every budget of one group, ascending, and the laws across them (None: fewer than three usable optima)."""

    budgets: tuple[Isoflop, ...]
    law: PowerLaw | None
    saturation: Saturation | None


def to_scale(x: Array, scale: Scale) -> Array:
    return np.asarray(np.log(x) if scale == "log" else np.log(x / (1 - x)), dtype=float)


def from_scale(z: float, scale: Scale) -> float:
    if not math.isfinite(z):
        return math.nan
    return math.exp(z) if scale == "log" else 1 / (1 + math.exp(-z))


def cluster(budgets: Array, tolerance: float | None = None) -> list[NDArray[np.intp]]:
    """Indices of the rows of each budget, ascending. Neighbours in log C stay together below a gap of `tolerance`; by
    default at the widest jump in the sorted gaps. Raises `Unclustered` for a group wider than a factor of two."""
    logs = np.log(budgets)
    order = np.argsort(logs, kind="stable")
    gaps = np.diff(logs[order])
    if tolerance is None:
        tolerance = _natural_gap(gaps)
    groups = np.split(order, np.flatnonzero(gaps > math.log1p(tolerance)) + 1)
    for group in groups:
        if np.ptp(logs[group]) > WIDEST:
            raise Unclustered(float(budgets[group].min()), float(budgets[group].max()))
    return groups


def _natural_gap(gaps: Array) -> float:
    """Between jitter and spacing: the sorted gaps rise slowly, jump once, and rise slowly again."""
    ordered = np.unique(np.maximum(gaps, SMALLEST_GAP)) if len(gaps) else np.array([])
    ordered = np.concatenate([[SMALLEST_GAP], ordered[ordered > SMALLEST_GAP]])
    jumps = [(b / a, a, b) for a, b in pairwise(ordered) if b > 0.1 and a < 0.3]
    if not jumps:
        return 0.1
    ratio, a, b = max(jumps)
    return math.expm1(math.sqrt(a * b)) if ratio > 1.5 else 0.1


def outliers(z: Array, y: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Rows that the rest of the curve refuses.

    A clean half is found by least trimmed squares (Rousseeuw 1984; random starts and concentration steps of Rousseeuw
    and Van Driessen 2006) with a polynomial, then grown one row at a time: a row joins while its prediction residual,
    Student-t for a row that was not fitted, stays within the Bonferroni limit (Hadi and Simonoff 1993). Too few rows
    for that (below seven) are never flagged.
    """
    n = len(z)
    places = distinct(z)
    degree = 4 if places >= 14 else 3 if places >= 9 else 2
    if n < 7 or places < degree + 3:
        return np.array([], dtype=int)
    u = (z - z.mean()) / max(np.ptp(z) / 2, 1e-300)
    x = np.stack([u**k for k in range(degree + 1)], axis=1)
    half = max((n + degree + 2) // 2, math.ceil(0.75 * n) if n < 12 else 0)
    clean = _trimmed(x, y, half, rng)
    inside = np.zeros(n, dtype=bool)
    inside[clean] = True
    while inside.sum() < n:
        xs, ys = x[inside], y[inside]
        inverse = np.linalg.pinv(xs.T @ xs)
        beta = inverse @ xs.T @ ys
        df = int(inside.sum()) - degree - 1
        scale = math.sqrt(float(((ys - xs @ beta) ** 2).sum()) / df)
        # The smallest residuals were chosen: their spread is too small by the truncated normal's factor.
        scale *= _consistency(inside.sum() / n)
        scale = max(scale, 1e-12 * float(np.abs(y).max()), 1e-300)
        leverage = np.einsum("ij,jk,ik->i", x, inverse, x)
        residual = np.abs(y - x @ beta) / (scale * np.sqrt(np.where(inside, 1 - leverage, 1 + leverage).clip(1e-9)))
        outside = np.flatnonzero(~inside)
        nearest = outside[int(np.argmin(residual[outside]))]
        if n * 2 * float(stats.t.sf(residual[nearest], df)) < OUTLIER:
            break
        inside[nearest] = True
    return np.flatnonzero(~inside)


def _consistency(share: float) -> float:
    """Standard deviation of a normal over that of its central part holding `share`."""
    if share >= 1:
        return 1.0
    q = float(stats.norm.ppf((1 + share) / 2))
    return 1 / math.sqrt(max(1 - 2 * q * float(stats.norm.pdf(q)) / share, 1e-6))


def _trimmed(x: Array, y: Array, half: int, rng: np.random.Generator, starts: int = 60) -> NDArray[np.intp]:
    """Indices of the least-trimmed-squares subset of size `half`."""
    n, p = x.shape
    best: NDArray[np.intp] = np.arange(half)
    least = math.inf
    for _ in range(starts):
        chosen: NDArray[np.intp] = rng.permutation(n)[:p]
        for _ in range(10):
            beta = np.linalg.lstsq(x[chosen], y[chosen], rcond=None)[0]
            after = np.argsort((y - x @ beta) ** 2, kind="stable")[:half]
            if len(after) == len(chosen) and set(after) == set(chosen):
                break
            chosen = after
        loss = float(((y - x @ beta)[chosen] ** 2).sum())
        if loss < least * (1 - 1e-9):
            best, least = chosen, loss
    return np.sort(best)


def analyse(
    budget: Array,
    x: Array,
    value: Array,
    *,
    minimize: bool = False,
    scale: Scale = "log",
    level: float = LEVEL,
    tolerance: float | None = None,
    drop_outliers: bool = True,
) -> Analysis:
    """All budgets of one group of rows. Within a budget, values are first moved to its mean C along the slope of the
    optimal value across budgets: at the optimum this is the whole effect of C at fixed x (envelope theorem)."""
    groups = cluster(budget, tolerance)
    z, y = to_scale(x, scale), -value if minimize else value.copy()
    flagged = {
        i: outliers(z[g], y[g], np.random.default_rng(0)) if drop_outliers else np.array([], dtype=int)
        for i, g in enumerate(groups)
    }
    kept = [np.delete(g, flagged[i]) for i, g in enumerate(groups)]
    centres = [float(np.log(budget[k]).mean()) for k in kept]
    curves = [_curve(z[k], y[k]) for k in kept]
    usable = [i for i, c in enumerate(curves) if c is not None]
    if len(usable) >= 2 and any(np.ptp(np.log(budget[k])) > 1e-3 for k in kept):
        tops = [_top(curves[i]) for i in usable]
        slope = np.gradient(np.array(tops), np.array([centres[i] for i in usable]))
        for i, s in zip(usable, slope, strict=True):
            k = kept[i]
            y[groups[i]] -= s * (np.log(budget[groups[i]]) - centres[i])
            if drop_outliers:
                flagged[i] = outliers(z[groups[i]], y[groups[i]], np.random.default_rng(0))
                kept[i] = k = np.delete(groups[i], flagged[i])
            curves[i] = _curve(z[k], y[k])
    found = tuple(
        _isoflop(budget, g, g[flagged[i]], kept[i], z, curves[i], centres[i], minimize, scale, level)
        for i, g in enumerate(groups)
    )
    used = [f for f in found if f.optimum.status in ("interior", "open") and math.isfinite(f.optimum.error)]
    law = power_law(
        np.log([f.budget for f in used]),
        np.array([f.optimum.z for f in used]),
        np.array([f.optimum.error for f in used]),
        level,
    )
    return Analysis(found, law, saturation([f.budget for f in used], [f.value for f in used], level))


def _curve(z: Array, y: Array) -> Curve | None:
    return best_degree(z, y, most=6, least=LEAST, higher_at=HIGHER_AT)


def _top(curve: Curve | None) -> float:
    assert curve is not None
    return float(curve.value(curve.argmax()))


def _isoflop(
    budget: Array,
    rows: NDArray[np.intp],
    dropped: NDArray[np.intp],
    kept: NDArray[np.intp],
    z: Array,
    curve: Curve | None,
    centre: float,
    minimize: bool,
    scale: Scale,
    level: float,
) -> Isoflop:
    optimum = locate(curve, level) if curve is not None else NO_OPTIMUM
    sign = -1.0 if minimize else 1.0
    known = curve is not None and optimum.status != "few"
    value = sign * float(curve.value(optimum.z)) if known and curve is not None else math.nan
    return Isoflop(
        budget=math.exp(centre),
        spread=float(budget[rows].max() / budget[rows].min() - 1),
        rows=tuple(int(r) for r in rows),
        outliers=tuple(int(r) for r in dropped),
        places=distinct(z[kept]),
        degree=curve.degree if curve is not None else 0,
        optimum=optimum,
        x=from_scale(optimum.z, scale),
        low=from_scale(optimum.low, scale),
        high=from_scale(optimum.high, scale),
        value=value,
        value_error=math.sqrt(curve.variance / len(kept)) if curve is not None else math.nan,
        curve=curve,
    )


def power_law(log_c: Array, z: Array, error: Array, level: float = LEVEL) -> PowerLaw | None:
    """Random-effects meta-regression of z on log C: the between-budget variance by Paule and Mandel (1982), the
    interval by Knapp and Hartung (2003), never narrower than the errors alone would give. None below three budgets.
    """
    k = len(z)
    if k < 3 or np.ptp(log_c) == 0:
        return None
    middle = log_c.mean()
    x = np.stack([np.ones(k), log_c - middle], axis=1)
    floor = 1e-12 * max(1.0, float(np.abs(z).max()))
    variances = np.maximum(error, floor) ** 2

    def solve(tau2: float) -> tuple[Array, Array, float]:
        w = 1 / (variances + tau2)
        inverse = np.linalg.inv((x.T * w) @ x)
        beta = inverse @ (x.T @ (w * z))
        return beta, inverse, float((w * (z - x @ beta) ** 2).sum())

    df = k - 2
    tau2 = 0.0
    if solve(0.0)[2] > df:
        upper = max(float(np.var(z)), float(variances.max()))
        while solve(upper)[2] > df:
            upper *= 4
        tau2 = float(optimize.brentq(lambda t: solve(t)[2] - df, 0.0, upper))
    beta, inverse, q = solve(tau2)
    se = math.sqrt(inverse[1, 1] * max(1.0, q / df))
    t = float(stats.t.ppf((1 + level) / 2, df))
    slope = float(beta[1])
    return PowerLaw(slope, slope - t * se, slope + t * se, se, float(beta[0] - slope * middle), math.sqrt(tau2), k)


def saturation(budgets: Sequence[float], values: Sequence[float], level: float = LEVEL) -> Saturation | None:
    """Limit, scale and exponent of the optimal value, by variable projection: for each exponent the rest is linear. The
    interval holds the exponents whose residual sum an F test accepts. None below five budgets."""
    c, y = np.asarray(budgets, dtype=float), np.asarray(values, dtype=float)
    if len(c) < 5 or np.ptp(np.log(c)) == 0 or np.ptp(y) == 0:
        return None
    reference = float(np.exp(np.log(c).mean()))
    u = np.log(c / reference)

    def solve(b: float) -> tuple[Array, float]:
        x = np.stack([np.ones(len(c)), np.exp(-b * u)], axis=1)
        beta = np.linalg.lstsq(x, y, rcond=None)[0]
        return beta, float(((y - x @ beta) ** 2).sum())

    grid = np.linspace(0.005, 1.5, 300)
    sums = np.array([solve(b)[1] for b in grid])
    best = int(np.argmin(sums))
    ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    exponent = float(optimize.minimize_scalar(lambda b: solve(b)[1], bounds=ends, method="bounded").x)
    beta, least = solve(exponent)
    df = len(c) - 3
    limit = max(least, 1e-300) * (1 + float(stats.f.ppf(level, 1, df)) / df)
    accepted = grid[sums <= limit]
    return Saturation(
        limit=float(beta[0]),
        scale=float(beta[1]),
        exponent=exponent,
        low=min(exponent, float(accepted.min())) if len(accepted) else exponent,
        high=max(exponent, float(accepted.max())) if len(accepted) else exponent,
        reference=reference,
        slope=float(np.polyfit(np.log10(c), y, 1)[0]),
    )
