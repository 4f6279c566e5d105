"""Statements about differences: exact on small tables, calibrated on simulated ones."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare import (
    EXCEEDS,
    NO_SPREAD,
    NO_START,
    ONE_SEED,
    WITHIN,
    Observation,
    cell_verdict,
    compare,
    compare_runs,
    details,
    holm,
    largest,
    pooled_sd,
    sentence,
)
from analysis.load import load_sweep
from race_sweeps.errors import UserError
from tests.test_analysis_load import RHO, edit, lines, write_sweep

NAN = math.nan


def table(values: dict[tuple[str, str], list[float]], start: float = NAN) -> list[Observation]:
    """Observations of cells; allocations are named by their planned rho in percent, achieved rho lies 0.01 above."""
    return [
        Observation(model, allocation, seed, value, int(allocation[1:]) / 100 + 0.01, int(allocation[1:]) / 100, start)
        for (model, allocation), cell in values.items()
        for seed, value in enumerate(cell)
    ]


def test_holm_by_hand() -> None:
    # Sorted: 4 x 0.005, 3 x 0.01, 2 x 0.03, then 0.04, which may not fall below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=30))
def test_holm_properties(p: list[float]) -> None:
    corrected = holm(p)
    for raw, c in zip(p, corrected, strict=True):
        assert raw <= c <= 1
        assert c <= min(1.0, len(p) * raw) or c == max(corrected)  # never blunter than Bonferroni, save for ties
    order = sorted(range(len(p)), key=lambda i: p[i])
    ranked = [corrected[i] for i in order]
    assert ranked == sorted(ranked)
    assert sorted(holm(p[::-1])) == sorted(corrected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.001, 0.2))
def test_holm_rejects_whatever_bonferroni_rejects(p: list[float], alpha: float) -> None:
    for raw, c in zip(p, holm(p), strict=True):
        if raw * len(p) <= alpha:
            assert c <= alpha


def test_pooled_sd_by_hand() -> None:
    # Squares within: 0.0008, 0.0002 and none of the single value; 2 degrees of freedom.
    sd, df = pooled_sd([[0.50, 0.54], [0.40, 0.42], [0.9]])
    assert df == 2
    assert sd == pytest.approx(math.sqrt(0.0005))
    assert pooled_sd([[0.1], [0.2]]) == (None, 0)
    assert pooled_sd([]) == (None, 0)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_pooled_sd_of_one_group_is_its_sd(group: list[float]) -> None:
    sd, df = pooled_sd([group])
    assert df == len(group) - 1
    assert sd == pytest.approx(statistics.stdev(group), abs=1e-9)


def test_two_cells_by_hand() -> None:
    rung = compare(table({("m", "r45"): [0.50, 0.54], ("m", "r70"): [0.40, 0.42]}))
    assert rung.df == 2
    assert rung.sd == pytest.approx(math.sqrt(0.0005))
    assert rung.family == 1
    assert rung.confidence == pytest.approx(0.95)
    (d,) = rung.allocations
    # t = 0.11 / sqrt(0.0005) with 2 degrees of freedom, whose p is 1 - t / sqrt(t^2 + 2), and t(0.975) = 4.302653.
    assert d.value == pytest.approx(0.11)
    assert d.p == pytest.approx(1 - math.sqrt(24.2 / 26.2), rel=1e-9)
    assert d.p_holm == d.p
    assert d.low == pytest.approx(0.11 - 4.302653 * math.sqrt(0.0005), abs=1e-7)
    assert d.high == pytest.approx(0.11 + 4.302653 * math.sqrt(0.0005), abs=1e-7)
    assert d.verdict == EXCEEDS
    assert rung.winner is rung.best["m"] is d.cell
    assert (rung.winner.allocation, rung.winner.mean, rung.winner.rho) == ("r45", 0.52, pytest.approx(0.46))
    assert rung.winner.sd == pytest.approx(math.sqrt(0.0008))
    assert rung.edges == {"m": "low"}
    assert rung.models == ()
    assert [g.verdict for g in rung.gains] == [NO_START]


def test_family_counts_gains_and_every_pair() -> None:
    rung = compare(table({("m", "r45"): [0.50, 0.54], ("m", "r70"): [0.40, 0.42]}, start=0.40))
    assert rung.family == 3
    (d,), (g,) = rung.allocations, rung.gains
    # p of the gains 0.12 and 0.01 (t^2 = 57.6, 0.4) and of the difference (24.2): three tests, corrected in this order.
    p_gain, p_pair = 1 - math.sqrt(57.6 / 59.6), 1 - math.sqrt(24.2 / 26.2)
    assert g.value == pytest.approx(0.12)
    assert g.p == pytest.approx(p_gain, rel=1e-9)
    assert g.p_holm == pytest.approx(3 * p_gain, rel=1e-9)
    assert d.p_holm == pytest.approx(2 * p_pair, rel=1e-9)
    assert (g.verdict, d.verdict) == (WITHIN, WITHIN)  # 0.0508 and 0.0779: alone, either would have passed
    assert d.low is not None
    assert d.low < 0
    assert rung.starts == {"m": pytest.approx(0.40)}
    three = compare(table({(m, a): [0.1, 0.2] for m in "abc" for a in ("r45", "r55", "r70", "r80", "r90")}, start=0.1))
    assert three.family == 15 * 14 // 2 + 15


def test_interval_of_a_found_difference_does_not_cross_zero() -> None:
    # Two differences are huge, so Holm tests the third alone (p 0.03); its Bonferroni interval over three crosses zero.
    rung = compare(table({("m", "r45"): [0.50, 0.54], ("m", "r55"): [0.44, 0.46], ("m", "r70"): [-5.0, -5.0]}))
    near, far = sorted(rung.allocations, key=lambda d: d.value)
    assert near.p is not None
    assert 0.05 / 3 < near.p < 0.05
    assert near.p_holm == pytest.approx(near.p)
    assert (near.verdict, far.verdict) == (EXCEEDS, EXCEEDS)
    assert near.low == 0.0
    assert near.high is not None
    assert near.high > 2 * near.value


def test_single_seeds_claim_nothing() -> None:
    rung = compare(table({("a", "r45"): [0.9], ("a", "r70"): [0.1], ("b", "r45"): [0.2]}, start=0.05))
    assert (rung.sd, rung.df, rung.family, rung.confidence) == (None, 0, 0, None)
    for d in (*rung.allocations, *rung.models, *rung.gains):
        assert d.verdict == ONE_SEED
        assert (d.low, d.high, d.p, d.p_holm) == (None, None, None, None)
    text = " ".join([sentence(rung), *details(rung)])
    assert "With one seed per cell there is no seed spread, so no difference is established." in text
    assert "exceeds" not in text
    assert "interval" not in text


def test_a_cell_with_one_seed_borrows_the_pooled_spread() -> None:
    rung = compare(table({("m", "r45"): [0.50, 0.54], ("m", "r70"): [0.40]}))
    (d,) = rung.allocations
    assert d.other is not None
    assert (d.other.n, d.other.sd, rung.df) == (1, None, 1)
    # t = 0.12 / sqrt(0.0008 x 1.5); with one degree of freedom p = 1 - 2 atan(t) / pi.
    assert d.p == pytest.approx(1 - 2 * math.atan(0.12 / math.sqrt(0.0012)) / math.pi, rel=1e-9)
    assert d.verdict == WITHIN


def test_seeds_that_agree_exactly_are_no_evidence() -> None:
    rung = compare(table({("m", "r45"): [0.5, 0.5], ("m", "r70"): [0.4, 0.4]}, start=0.1))
    assert rung.sd == 0
    assert [d.verdict for d in (*rung.allocations, *rung.gains)] == [NO_SPREAD, NO_SPREAD]


def test_runs_of_the_same_seed_are_averaged_first() -> None:
    one = table({("m", "r45"): [0.5, 0.7]})
    again = [*one, Observation("m", "r45", 1, 0.9, 0.46, 0.45)]
    cell = compare(again).cells[0]
    assert (cell.n, cell.seeds) == (2, (0, 1))
    assert cell.values == pytest.approx((0.5, 0.8))


@pytest.mark.parametrize(
    ("means", "edge", "words"),
    [
        ({"r45": 0.5, "r70": 0.4, "r90": 0.3}, "low", "r45 is at the low edge of the tested rho range: only a bound."),
        (
            {"r45": 0.3, "r70": 0.4, "r90": 0.5},
            "high",
            "r90 is at the high edge of the tested rho range: only a bound.",
        ),
        ({"r45": 0.3, "r70": 0.5, "r90": 0.4}, "", ""),
        ({"r70": 0.5}, "only", "it is the only cell tested."),
    ],
)
def test_edges(means: dict[str, float], edge: str, words: str) -> None:
    rung = compare(table({("m", a): [v - 0.01, v + 0.01] for a, v in means.items()}))
    assert rung.edges == {"m": edge}
    assert words in sentence(rung)
    assert ("edge" in sentence(rung)) == (edge in ("low", "high"))
    verdict = cell_verdict(rung, rung.best["m"])
    assert verdict.startswith("best of m")
    assert ("bound" in verdict) == (edge in ("low", "high"))


def test_edge_goes_by_achieved_rho() -> None:
    runs = [
        Observation("m", "r45", 0, 0.5, rho=0.60, rho_planned=0.45),
        Observation("m", "r55", 0, 0.4, rho=0.55, rho_planned=0.55),
        Observation("m", "r70", 0, 0.4, rho=0.70, rho_planned=0.70),
    ]
    assert compare(runs).edges == {"m": ""}


def test_sentence_names_winner_margins_and_achieved_rho() -> None:
    cells = {
        ("a", "r45"): [0.300, 0.302], ("a", "r70"): [0.320, 0.322], ("a", "r90"): [0.250, 0.252],
        ("b", "r45"): [0.500, 0.502], ("b", "r70"): [0.600, 0.602], ("b", "r90"): [0.599, 0.601],
    }  # fmt: skip
    rung = compare(table(cells, start=0.1), budget=4e11)
    assert sentence(rung) == (
        "At 400 GFLOP, b at r70 (achieved rho 0.710) has the highest pass@1, 0.601: 0.280 above a at r70 (achieved rho "
        "0.710; exceeds seed spread) and 0.001 above its own r90 (achieved rho 0.910; within seed spread)."
    )
    assert details(rung)[0] == "b at r70 (achieved rho 0.710): pass@1 0.601, mean of 2 seeds"
    assert details(rung)[-1].startswith("gain over its own value before training: +0.501; exceeds seed spread: 95%")


@given(st.permutations(range(12)), st.floats(-5, 5))
def test_order_and_level_do_not_matter(order: list[int], level: float) -> None:
    rng = np.random.default_rng(5)
    cells = {(m, a): list(rng.normal(0.3, 0.1, 2)) for m in "ab" for a in ("r45", "r70", "r90")}
    runs = table(cells)
    before = compare(runs)
    shifted = [
        Observation(o.model, o.allocation, o.seed, o.value + level, o.rho, o.rho_planned)
        for o in (runs[i] for i in order)
    ]
    after = compare(shifted)
    assert after.sd == pytest.approx(before.sd)
    assert after.winner.name == before.winner.name
    found = {(d.cell.name, d.other.name): d for d in after.allocations if d.other}
    for d in before.allocations:
        assert d.other is not None
        twin = found[d.cell.name, d.other.name]
        assert twin.value == pytest.approx(d.value)
        assert twin.p_holm == pytest.approx(d.p_holm, rel=1e-6)


def simulate(rng: np.random.Generator, means: dict[tuple[str, str], float], sd: float) -> list[Observation]:
    return table({key: [float(v) for v in rng.normal(mean, sd, 2)] for key, mean in means.items()}, start=0.3)


GRID = [(m, a) for m in ("s", "m", "l") for a in ("r45", "r55", "r70", "r80", "r90")]


def test_false_claims_are_rare_on_null_data() -> None:
    # 3 models x 5 allocations x 2 seeds without any true difference, nor any gain: a false claim anywhere in a rung
    # may come up in 5% of rungs. 400 replicates: three standard errors of a 5% rate are 3.3%.
    rng = np.random.default_rng(20250101)
    replicates, false, uncorrected = 400, 0, 0
    for _ in range(replicates):
        rung = compare(simulate(rng, dict.fromkeys(GRID, 0.3), 0.02))
        made = [*rung.allocations, *rung.models, *rung.gains]
        assert len(made) == 3 * 4 + 2 + 3
        false += any(d.verdict == EXCEEDS for d in made)
        uncorrected += any(d.p is not None and d.p <= 0.05 for d in made)
    assert false / replicates <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / replicates)
    assert uncorrected / replicates > 0.5  # without the correction, most rungs would carry a false claim


def test_picking_the_best_of_many_does_not_claim_a_better_model() -> None:
    # Five equal allocations against a model with one of that level and four far below: the first model's best is the
    # luckiest of five, the second's is not, and yet the models' true best are equal.
    rng = np.random.default_rng(7)
    means = {("s", a): 0.5 for a in ("r45", "r55", "r70", "r80", "r90")}
    means |= {("m", a): 0.5 if a == "r70" else 0.1 for a in ("r45", "r55", "r70", "r80", "r90")}
    replicates = 300
    false = sum(
        any(d.verdict == EXCEEDS for d in (*rung.models, *(d for d in rung.allocations if d.cell.model == "s")))
        for rung in (compare(simulate(rng, means, 0.02)) for _ in range(replicates))
    )
    assert false / replicates <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / replicates)


def test_clear_differences_are_found() -> None:
    rng = np.random.default_rng(11)
    means = {(m, a): 0.3 + (0.2 if (m, a) == ("m", "r55") else 0.0) for m, a in GRID}
    found = 0
    for _ in range(100):
        rung = compare(simulate(rng, means, 0.02))
        mine = [d for d in rung.allocations if d.cell.model == "m"]
        assert rung.winner.name.startswith("m at r55")
        found += all(d.verdict == EXCEEDS for d in (*mine, *rung.models))
    assert found >= 95  # ten standard deviations of one run


def test_runs_meet_only_at_equal_budgets_and_settings(tmp_path: Path) -> None:
    folders = write_sweep(tmp_path / "s")
    moved = folders["tiny-m", "rho70", 1]
    edit(moved / "result.json", reward="dense")
    rungs = compare_runs(load_sweep(tmp_path / "s").runs)
    assert [(r.setting, r.budget) for r in rungs] == [
        (s, b) for s in ("sparse", "dense") for b in (1e11, 2e11, 4e11)
    ]  # fmt: skip
    assert [r.setting for r in largest(rungs)] == ["sparse", "dense"]
    assert largest(rungs)[0].budget == 4e11
    dense = largest(rungs)[1]
    assert [(c.model, c.allocation, c.n) for c in dense.cells] == [("tiny-m", "rho70", 1)]
    assert sentence(dense).startswith("At 400 GFLOP, tiny-m at rho70 (achieved rho 0.710) has the highest pass@1, ")
    assert "it is the only cell tested" in sentence(dense)


def test_cells_of_a_loaded_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", value=lambda model, fraction, seed, rung: 0.3 + 0.1 * RHO[fraction] + 0.01 * seed)
    rung = compare_runs(load_sweep(tmp_path / "s").runs)[-1]
    assert [(c.model, c.allocation) for c in rung.cells] == [
        (m, f) for m in ("tiny-s", "tiny-m") for f in ("rho45", "rho70", "rho90")
    ]  # fmt: skip
    cell = rung.cells[0]
    assert cell.values == pytest.approx((0.345, 0.355))
    assert (cell.c_total, cell.c_error) == (4.04e11, pytest.approx(0.01))
    assert cell.gain == pytest.approx(0.35 - 0.19)
    assert rung.sd == pytest.approx(0.01 / math.sqrt(2))
    assert rung.starts == pytest.approx({"tiny-s": 0.19, "tiny-m": 0.26})


def test_rung_missing_for_one_run(tmp_path: Path) -> None:
    path = write_sweep(tmp_path / "s")["tiny-s", "rho45", 0]
    text = (path / "evals.jsonl").read_text().splitlines(keepends=True)
    (path / "evals.jsonl").write_text("".join(text[:2] + text[3:]))
    first, second, third = compare_runs(load_sweep(tmp_path / "s").runs)
    assert [r.cells[0].n for r in (first, second, third)] == [2, 1, 2]
    assert [r.df for r in (first, second, third)] == [6, 5, 6]


def test_other_values_and_sets(tmp_path: Path) -> None:
    path = write_sweep(tmp_path / "s")["tiny-s", "rho45", 0]
    runs = load_sweep(tmp_path / "s").runs
    assert compare_runs(runs, "native_reward")[0].cells[0].mean == pytest.approx(0.3)
    assert compare_runs(runs, "native_reward")[0].cells[0].gain == pytest.approx(0.1)
    with pytest.raises(UserError, match=r"value 'pass1': did you mean 'pass@1'\?"):
        compare_runs(runs, "pass1")
    with pytest.raises(UserError, match="evaluation set 'math': valid: heldout"):
        compare_runs(runs, evaluation_set="math")
    lines(path / "evals.jsonl", [])
    with pytest.raises(UserError, match="no finished point yet"):
        compare_runs(runs.iloc[:0])
