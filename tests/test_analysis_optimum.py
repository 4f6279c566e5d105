"""The place of a maximum, its interval, and what is said where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from analysis.optimum import best_degree, fit, locate

RHO = np.array([0.45, 0.55, 0.7, 0.8, 0.9])
Z = np.log(RHO / (1 - RHO))
SEEDS = 3
POINTS, BLOCKS = np.repeat(Z, SEEDS), np.tile(np.arange(SEEDS), len(Z))


def parabola(z: NDArray[np.float64], top: float) -> NDArray[np.float64]:
    return 0.6 - 0.05 * (z - top) ** 2


def test_noise_free_parabola_is_found_exactly() -> None:
    optimum = locate(fit(Z, parabola(Z, 0.9), 2))
    assert optimum.status == "interior"
    assert optimum.z == pytest.approx(0.9, abs=1e-9)
    assert optimum.low == pytest.approx(0.9, abs=1e-5)
    assert optimum.high == pytest.approx(0.9, abs=1e-5)


def test_interval_is_fiellers() -> None:
    """The ends solve (b + 2cz)^2 = q^2 Var(b + 2cz), here with coefficients and covariance from plain least squares."""
    from scipy import stats

    y = parabola(POINTS, 0.9) + np.random.default_rng(0).normal(0, 0.01, len(POINTS))
    optimum = locate(fit(POINTS, y, 2))
    x = np.stack([np.ones_like(POINTS), POINTS, POINTS**2], axis=1)
    inverse = np.linalg.inv(x.T @ x)
    _, b, c = beta = inverse @ x.T @ y
    df = len(y) - 3
    v = ((y - x @ beta) ** 2).sum() / df * inverse
    q = stats.t.ppf(0.95, df) ** 2
    ends = np.roots([4 * c * c - q * 4 * v[2, 2], 4 * b * c - q * 4 * v[1, 2], b * b - q * v[1, 1]])
    assert optimum.status == "interior"
    assert optimum.z == pytest.approx(-b / (2 * c))
    assert (optimum.low, optimum.high) == pytest.approx(tuple(np.sort(ends)))


def test_level_of_a_block_does_not_matter() -> None:
    y = parabola(POINTS, 0.9) + np.random.default_rng(1).normal(0, 0.01, len(POINTS))
    plain, shifted = (locate(fit(POINTS, values, 2, list(BLOCKS))) for values in (y, y + 5.0 * BLOCKS))
    assert (plain.z, plain.low, plain.high) == pytest.approx((shifted.z, shifted.low, shifted.high), abs=1e-6)


@pytest.mark.parametrize(("top", "edge"), [(-2.0, "low"), (4.0, "high")])
def test_optimum_outside_is_a_bound(top: float, edge: str) -> None:
    y = parabola(POINTS, top) + np.random.default_rng(2).normal(0, 0.01, len(POINTS))
    optimum = locate(fit(POINTS, y, 2, list(BLOCKS)))
    assert (optimum.status, optimum.edge) == ("edge", edge)
    assert optimum.z == pytest.approx(Z[0] if edge == "low" else Z[-1])
    assert (optimum.open_low, optimum.open_high) == (edge == "low", edge == "high")


def test_flat_convex_and_too_few() -> None:
    noise = np.random.default_rng(3).normal(0, 0.01, len(POINTS))
    assert locate(fit(POINTS, 0.5 + noise, 2)).status == "flat"
    assert locate(fit(POINTS, 1 - parabola(POINTS, 0.9) + noise, 2)).status == "convex"
    assert locate(fit(Z[:3], parabola(Z[:3], 0.9), 2)).status == "few"
    assert locate(fit([0.5] * 9, np.arange(9.0), 2)).status == "few"
    assert locate(best_degree([0.0, 1.0] * 4, np.arange(8.0))).status == "few"


def test_a_skewed_curve_takes_a_higher_degree() -> None:
    """Losses are skewed in log x: over two decades a parabola misses the optimum, a higher degree does not."""
    x = np.linspace(-2.5, 2.0, 15)

    def value(at: NDArray[np.float64]) -> NDArray[np.float64]:
        return -(np.exp(-0.8 * at) + np.exp(0.7 * at))

    top = np.log(0.8 / 0.7) / 1.5
    y = value(x) + np.random.default_rng(4).normal(0, 0.01, len(x))
    curve, parabola_only = best_degree(x, y), fit(x, y, 2)
    assert curve is not None
    assert curve.degree > 2
    assert abs(locate(curve).z - top) < 0.05 < abs(locate(parabola_only).z - top)


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_interval_keeps_its_level(noise: float) -> None:
    """600 sweeps of three seeds: the count inside is binomial, sd 0.012 at 90%; 3 sd are allowed either way."""
    rng, top, inside = np.random.default_rng(5), 0.75, 0
    for _ in range(600):
        y = parabola(POINTS, top) + rng.normal(0, noise, len(POINTS)) + 0.02 * rng.normal(size=SEEDS)[BLOCKS]
        optimum = locate(best_degree(POINTS, y, list(BLOCKS)))
        inside += optimum.low <= top <= optimum.high
    assert 0.863 <= inside / 600 <= 0.937
