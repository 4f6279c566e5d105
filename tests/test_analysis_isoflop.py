"""IsoFLOP tables with known optima: exponents, budgets that are not quite equal, outliers, what has no optimum."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from analysis.cli import main
from analysis.isoflop import Unclustered, analyse, cluster, outliers, power_law

Array = NDArray[np.float64]
BUDGETS = np.logspace(18, 21.5, 8)
A, ALPHA, B, BETA = 406.4, 0.34, 410.7, 0.28
EXPONENT = BETA / (ALPHA + BETA)
SIZE = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))  # optimal N at C = 6


def table(seed: int, noise: float, per_budget: int = 125) -> tuple[Array, Array, Array]:
    """Loss = E + A / N^alpha + B / D^beta at C = 6 N D, C off its budget by 3%, sizes on no grid."""
    rng = np.random.default_rng(seed)
    nominal = np.repeat(BUDGETS, per_budget)
    n = SIZE * (nominal / 6) ** EXPONENT * np.exp(rng.uniform(-1.2, 1.2, len(nominal)))
    c = nominal * np.exp(rng.normal(0, 0.03, len(nominal)))
    loss = 1.69 + A / n**ALPHA + B / (c / 6 / n) ** BETA
    return c, n, loss + rng.normal(0, noise, len(nominal))


@pytest.mark.parametrize(("noise", "allowed"), [(0.003, 0.006), (0.02, 0.02)])
def test_exponent_of_a_chinchilla_like_table(noise: float, allowed: float) -> None:
    found = analyse(*table(1, noise), minimize=True)
    assert [len(b.rows) for b in found.budgets] == [125] * 8
    # With much noise an interval may reach an end of the range, which is told; nothing else may be said here.
    assert {b.optimum.status for b in found.budgets} <= ({"interior"} if noise < 0.01 else {"interior", "open"})
    assert found.law is not None
    assert found.law.exponent == pytest.approx(EXPONENT, abs=allowed)
    assert found.law.low < EXPONENT < found.law.high


def test_noise_free_parabolas_give_their_exponent_exactly() -> None:
    budgets, x = np.repeat(BUDGETS[:4], 9), np.tile(np.exp(np.linspace(-1, 1, 9)), 4)
    x = x * budgets**0.4
    value = 5 - (np.log(x) - 0.4 * np.log(budgets) - 0.2) ** 2
    found = analyse(budgets, x, value)
    assert found.law is not None
    assert found.law.exponent == pytest.approx(0.4, abs=1e-6)
    assert found.law.intercept == pytest.approx(0.2, abs=1e-5)


def test_budgets_are_told_apart_or_refused() -> None:
    jittered = np.repeat([1e18, 3e18, 6e18], 20) * np.exp(np.random.default_rng(0).normal(0, 0.03, 60))
    assert [sorted(g) for g in cluster(jittered)] == [list(range(i, i + 20)) for i in (0, 20, 40)]
    assert [len(g) for g in cluster(np.array([1e18, 1e18, 2e18]))] == [2, 1]
    with pytest.raises(Unclustered, match="without a gap"):
        cluster(np.logspace(18, 20, 200))


def test_planted_outliers_are_flagged_and_sound_rows_are_not() -> None:
    rng = np.random.default_rng(3)
    z = np.linspace(-1, 1, 20)
    y = -(z**2) + rng.normal(0, 0.01, 20)
    assert len(outliers(z, y, rng)) == 0
    y[[4, 11]] += (0.2, -0.3)
    assert outliers(z, y, rng).tolist() == [4, 11]


def test_edge_flat_and_few_give_no_law() -> None:
    rng = np.random.default_rng(4)
    x = np.tile(np.exp(np.linspace(0, 2, 12)), 3)
    budgets = np.repeat([1e18, 1e19, 1e20], 12)
    rising = analyse(budgets, x, np.log(x) + rng.normal(0, 0.01, 36))
    assert [(b.optimum.status, b.optimum.edge) for b in rising.budgets] == [("edge", "high")] * 3
    assert rising.law is None
    few = analyse(budgets[[0, 1, 12, 13]], x[[0, 1, 12, 13]], np.ones(4))
    assert [b.optimum.status for b in few.budgets] == ["few", "few"]


def test_power_law_interval_is_knapp_and_hartungs() -> None:
    """Equal errors, no excess spread: ordinary least squares with t on k - 2, the errors as a floor."""
    from scipy import stats

    x = np.arange(5.0)
    law = power_law(x, 2 * x + 1, np.full(5, 0.1))
    assert law is not None
    assert law.tau == 0
    half = stats.t.ppf(0.95, 3) * 0.1 / np.sqrt(10)
    assert (law.exponent, law.low, law.high) == pytest.approx((2, 2 - half, 2 + half))


# --- the command -------------------------------------------------------------------------------------------------


def written(tmp_path: Path, columns: dict[str, list[object]]) -> str:
    file = tmp_path / "table.csv"
    rows = zip(*columns.values(), strict=True)
    file.write_text("\n".join(",".join(map(str, row)) for row in [tuple(columns), *rows]) + "\n", encoding="utf-8")
    return str(file)


def parabolas(exponent: float, edge: float = 0.0) -> dict[str, list[object]]:
    budgets, z = np.repeat(BUDGETS[:4], 9), np.tile(np.linspace(-1, 1, 9), 4)
    noise = np.random.default_rng(3).normal(0, 0.01, len(z))
    x = np.exp(z) * budgets**exponent
    return {"C": list(budgets), "N": list(x), "loss": list(2 + (z - edge) ** 2 + noise)}


COLUMNS = ["--budget", "C", "--x", "N", "--value", "loss"]


def test_the_command_fits_a_table_and_counts_empty_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table_ = parabolas(0.4)
    table_["loss"][5] = ""
    assert main(["isoflop", written(tmp_path, table_), *COLUMNS, "--minimize", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["left_out"], found["scale"]) == (35, {"loss": 1}, "log")
    (group,) = found["groups"]
    assert [b["status"] for b in group["budgets"]] == ["interior"] * 4
    assert group["power_law"]["exponent"] == pytest.approx(0.4, abs=0.01)
    assert group["power_law"]["low"] < 0.4 < group["power_law"]["high"]


def test_the_command_flags_an_edge_and_a_flat_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table_ = parabolas(0.4, edge=3.0)
    flat = np.random.default_rng(0).normal(2, 0.01, 9)
    table_["loss"][:9] = list(flat)
    assert main(["isoflop", written(tmp_path, table_), *COLUMNS, "--minimize"]) == 0
    said = capsys.readouterr().out
    assert "no effect of x that could be told from noise" in said
    assert said.count("the optimum lies there or beyond") == 3
    assert "no law across budgets" in said


def test_shares_are_fitted_by_group_on_a_logit_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rho = np.tile(np.linspace(0.3, 0.9, 9), 2)
    logit = np.log(rho / (1 - rho))
    peak = np.repeat([0.4, 1.2], 9)
    columns: dict[str, list[object]] = {
        "C": [1e18] * 18, "rho": list(rho), "reward": list(1 - (logit - peak) ** 2), "model": ["a"] * 9 + ["b"] * 9,
    }  # fmt: skip
    arguments = ["--budget", "C", "--x", "rho", "--value", "reward", "--group", "model", "--json"]
    assert main(["isoflop", written(tmp_path, columns), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scale"] == "logit"
    tops = [group["budgets"][0]["x"] for group in found["groups"]]
    assert tops == pytest.approx([1 / (1 + np.exp(-p)) for p in (0.4, 1.2)], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({}, ["--budget", "CC", "--x", "N", "--value", "loss"], "no column 'CC'"),
        ({"N": "many"}, COLUMNS, "line 4: N='many': must be a positive number"),
        ({"C": "-1"}, COLUMNS, "line 4: C='-1': must be a positive number"),
        ({"loss": "inf"}, COLUMNS, "line 4: loss='inf': must be a number"),
        ({}, [*COLUMNS, "--scale", "logit"], "--scale logit: N reaches"),
        ({}, [*COLUMNS, "--tolerance", "2"], "--tolerance 2: a share between 0 and 1"),
    ],
)
def test_a_mistake_in_a_table_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], arguments: list[str], says: str
) -> None:
    table_ = parabolas(0.4)
    for column, cell in change.items():
        table_[column][2] = cell
    assert main(["isoflop", written(tmp_path, table_), *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
