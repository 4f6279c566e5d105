"""Where a curve has its maximum, with an interval that holds its level at few seeds.

A polynomial in a transformed x (log, logit) is fitted by least squares, with a level of its own for each block (seed).
Its slope at any x is linear in the coefficients, so "the maximum is at x" is a t test of a zero slope there, and the
values of x that pass are an exact confidence set under normal noise (Fieller 1954, "Some problems in interval
estimation", for the parabola). At an end of the tested range the test is one-sided: the maximum lies there when the
curve falls away from it. Nothing is claimed outside the range. A percentile bootstrap over three seeds, measured on the
same simulated sweeps, falls far short of its level (docs/LOG.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]
Status = Literal["interior", "open", "edge", "flat", "convex", "few"]

LEVEL = 0.90  # of the interval of an optimum
FLAT = 0.10  # a curve whose F test against a constant gives a larger p has no optimum to report
HIGHER = 0.01  # the next degree is taken when its coefficient is this significant
GRID = 801

MEANING: dict[Status, str] = {
    "interior": "inside the tested range on both sides",
    "open": "inside the tested range, but its interval reaches an end of it",
    "edge": "at an end of the tested range, so only a bound: the optimum may lie beyond",
    "flat": "no difference along the range that the noise does not explain: no optimum",
    "convex": "the curve is bent the other way: the best values lie at the ends, there is no interior optimum",
    "few": "too few points for a curve and its noise",
}


@dataclass(frozen=True)
class Curve:
    """A fitted polynomial, to be maximised. `low`, `high`: tested range of z; u = (z - middle) / half runs over -1..1.

    `coefficients`: of u, u^2, ... ; `unscaled`: their covariance over `variance`, the residual variance with `df`
    degrees of freedom. `p_flat`: F test against a constant. `residuals` in the order given.
    """

    coefficients: Array
    unscaled: Array
    level: float
    variance: float
    df: int
    low: float
    high: float
    p_flat: float
    residuals: Array

    @property
    def degree(self) -> int:
        return len(self.coefficients)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def _u(self, z: ArrayLike) -> Array:
        return (np.asarray(z, dtype=float) - self.middle) / self.half

    def value(self, z: ArrayLike) -> Array:
        u = self._u(z)
        return np.asarray(self.level + sum(c * u ** (k + 1) for k, c in enumerate(self.coefficients)))

    def gradient(self, z: ArrayLike) -> Array:
        """Derivative of the slope at z with respect to the coefficients: shape (len(z), degree)."""
        u = np.atleast_1d(self._u(z))
        return np.stack([(k + 1) * u**k for k in range(self.degree)], axis=1) / self.half

    def slope(self, z: ArrayLike) -> tuple[Array, Array]:
        """Slope at z and its standard error."""
        g = self.gradient(z)
        error = np.sqrt(self.variance * np.einsum("ij,jk,ik->i", g, self.unscaled, g))
        return g @ self.coefficients, error

    def t(self, z: ArrayLike) -> Array:
        """Slope over its standard error; infinite where the noise is nil."""
        slope, error = self.slope(z)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(slope == 0, 0.0, slope / error)

    def bend(self, z: float) -> tuple[float, float]:
        """Second derivative at z, and its standard error."""
        u = float(self._u(z))
        g = np.array([k * (k + 1) * u ** (k - 1) if k else 0.0 for k in range(self.degree)]) / self.half**2
        return float(g @ self.coefficients), math.sqrt(max(self.variance * float(g @ self.unscaled @ g), 0.0))

    def argmax(self) -> float:
        """Where the fitted curve is highest within the tested range."""
        derivative = np.array([(k + 1) * c for k, c in enumerate(self.coefficients)])
        roots = np.roots(derivative[::-1]) if np.any(derivative) else np.array([])
        inside = [float(r.real) for r in roots if abs(r.imag) < 1e-9 and -1 < r.real < 1]
        candidates = np.array([self.low, self.high, *(self.middle + self.half * r for r in inside)])
        return float(candidates[int(np.argmax(self.value(candidates)))])

    @property
    def unimodal(self) -> bool:
        """Whether the slope changes sign at most once within the range, from rising to falling."""
        signs = np.sign(self.slope(np.linspace(self.low, self.high, GRID))[0])
        signs = signs[signs != 0]
        changes = np.flatnonzero(np.diff(signs))
        return len(changes) == 0 or (len(changes) == 1 and signs[0] > 0)


@dataclass(frozen=True)
class Optimum:
    """Where the maximum lies, on the scale of z. `low`, `high`: its interval, within the tested range; `open_low`,
    `open_high`: it reaches that end, so the optimum may lie beyond. `error`: standard error of `z` by the delta method
    (NaN unless inside). `edge`: the end an edge optimum stands at. Without a fit (`few`) the numbers are NaN."""

    status: Status
    z: float
    low: float
    high: float
    open_low: bool
    open_high: bool
    error: float
    edge: Literal["low", "high", ""] = ""


NO_OPTIMUM = Optimum("few", math.nan, math.nan, math.nan, True, True, math.nan)


def distinct(z: ArrayLike, tolerance: float = 1e-9) -> int:
    """Number of different values, those closer than `tolerance` of the range counting as one."""
    values = np.sort(np.asarray(z, dtype=float))
    return int(1 + (np.diff(values) > tolerance * (values[-1] - values[0])).sum()) if len(values) else 0


def fit(z: ArrayLike, y: ArrayLike, degree: int, blocks: Sequence[Any] | None = None) -> Curve | None:
    """Least-squares polynomial of `degree` >= 1 in z, each block with a level of its own. None without a residual
    degree of freedom, or when the values of z do not determine it."""
    z_all, y_all = np.asarray(z, dtype=float), np.asarray(y, dtype=float)
    if len(z_all) < degree + 2 or np.ptp(z_all) == 0:
        return None
    low, high = float(z_all.min()), float(z_all.max())
    u = (z_all - (low + high) / 2) / ((high - low) / 2)
    x = np.stack([u ** (k + 1) for k in range(degree)], axis=1)
    labels = np.zeros(len(u), dtype=int) if blocks is None else np.unique(np.asarray(blocks), return_inverse=True)[1]
    within_x, within_y = _within(x, labels), _within(y_all[:, None], labels)[:, 0]
    df = len(u) - (int(labels.max()) + 1) - degree
    if df < 1 or np.linalg.matrix_rank(within_x, tol=1e-9 * math.sqrt(len(u))) < degree:
        return None
    unscaled = np.asarray(np.linalg.inv(within_x.T @ within_x), dtype=float)
    coefficients = unscaled @ (within_x.T @ within_y)
    residuals = within_y - within_x @ coefficients
    # A fit that leaves nothing but rounding still has that much noise.
    floor = (1e-14 * max(1e-300, float(np.abs(y_all).max()))) ** 2
    variance = max(float(residuals @ residuals) / df, floor)
    explained = float(coefficients @ np.linalg.solve(unscaled, coefficients)) / degree / variance
    return Curve(
        coefficients=coefficients,
        unscaled=unscaled,
        level=float(y_all.mean() - x.mean(axis=0) @ coefficients),
        variance=variance,
        df=df,
        low=low,
        high=high,
        p_flat=float(stats.f.sf(explained, degree, df)),
        residuals=residuals,
    )


def _within(values: Array, labels: NDArray[Any]) -> Array:
    """Values less the mean of their block, by column."""
    counts = np.bincount(labels)
    columns = [values[:, j] - (np.bincount(labels, values[:, j]) / counts)[labels] for j in range(values.shape[1])]
    return np.stack(columns, axis=1)


def best_degree(
    z: ArrayLike,
    y: ArrayLike,
    blocks: Sequence[Any] | None = None,
    cells: int | None = None,
    most: int = 5,
    least: int = 2,
    higher_at: float = HIGHER,
) -> Curve | None:
    """The parabola, or a higher degree where the data need it: one more while its coefficient is significant at
    `higher_at`, at least two of the `cells` different places are left over, and the curve keeps a single maximum.
    `least`: the degree to begin at, where the places allow it and the curve then has a single maximum."""
    places = distinct(z) if cells is None else cells
    if places < 3:
        return None
    curve, start = fit(z, y, 2, blocks), 2
    for degree in range(least, 2, -1):
        first = fit(z, y, degree, blocks) if places >= degree + 2 else None
        if first is not None and first.df >= 2 and first.unimodal:
            curve, start = first, degree
            break
    for degree in range(start + 1, most + 1):
        if curve is None or places < degree + 2:
            break
        higher = fit(z, y, degree, blocks)
        if higher is None or higher.df < 2:
            break
        error = math.sqrt(higher.variance * higher.unscaled[-1, -1])
        p = 2 * float(stats.t.sf(abs(higher.coefficients[-1]) / error, higher.df)) if error else 0.0
        if p > higher_at or not higher.unimodal:
            # An even term may only be needed beside the next odd one, and the other way round.
            after = fit(z, y, degree + 1, blocks) if degree < most and places >= degree + 3 else None
            if after is None or after.df < 2 or not after.unimodal or _p_of_two(curve, after) > higher_at:
                break
            higher = after
            if higher.degree <= curve.degree:
                break
        if higher.degree > curve.degree:
            curve = higher
    return curve


def _p_of_two(lower: Curve, higher: Curve) -> float:
    """F test of a higher degree against a lower one, fitted to the same data."""
    extra = higher.degree - lower.degree
    gain = float(lower.residuals @ lower.residuals - higher.residuals @ higher.residuals) / extra
    return float(stats.f.sf(max(gain, 0.0) / higher.variance, extra, higher.df))


def locate(curve: Curve | None, level: float = LEVEL) -> Optimum:
    """The maximum of a fitted curve within the tested range, its interval, and what may be said of it."""
    if curve is None:
        return NO_OPTIMUM
    q = float(stats.t.ppf((1 + level) / 2, curve.df))
    z = np.linspace(curve.low, curve.high, GRID)
    t = curve.t(z)
    inside = np.abs(t) <= q
    inside[0], inside[-1] = t[0] <= q, t[-1] >= -q
    top = curve.argmax()
    accepted = np.flatnonzero(inside)
    low = min(_cross(curve, z, accepted[0], -1, q), top) if len(accepted) else top
    high = max(_cross(curve, z, accepted[-1], 1, q), top) if len(accepted) else top
    open_low, open_high = bool(inside[0]), bool(inside[-1])
    interior = curve.low < top < curve.high
    bend, error = curve.bend(top)
    delta = float(curve.slope(top)[1][0]) / abs(bend) if interior and bend < 0 else math.nan
    status: Status
    if curve.p_flat > FLAT:
        status = "flat"
    elif interior:
        status = "open" if open_low or open_high else "interior"
    elif curve.degree == 2 and bend > q * error and curve.slope(curve.low)[0][0] < 0 < curve.slope(curve.high)[0][0]:
        status = "convex"
    else:
        status = "edge"
    side: Literal["low", "high"] = "low" if top == curve.low else "high"
    return Optimum(status, top, low, high, open_low, open_high, delta, side if status == "edge" else "")


def _cross(curve: Curve, z: Array, index: int, step: int, q: float) -> float:
    """Where the test begins to accept, between an accepted grid value and the refused one beside it."""
    from scipy.optimize import brentq

    other = int(index) + step
    if not 0 <= other < len(z):
        return float(z[index])

    def excess(at: float) -> float:
        return float(abs(curve.t(at)[0]) - q)

    a, b = float(z[index]), float(z[other])
    if excess(a) * excess(b) > 0:
        return a
    return float(brentq(excess, a, b, xtol=1e-10 * curve.half))
