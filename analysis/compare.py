"""Which differences between allocations and models exceed what the seed alone does.

A cell is one (model, allocation) at one rung; its runs differ by seed only. Sources: Student (1908), "The probable
error of a mean"; Holm (1979), "A simple sequentially rejective multiple test procedure".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from analysis.units import fixed, flops_text, p_text, signed
from race_sweeps.errors import UserError, choices

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
EXCEEDS = "exceeds seed spread"
WITHIN = "within seed spread"
ONE_SEED = "undetermined: one seed"
NO_SPREAD = "undetermined: seeds agree exactly"
NO_START = "undetermined: no evaluation before training"
VALUES = ("pass@1", "native_reward")

Edge = Literal["low", "high", "only", ""]


@dataclass(frozen=True)
class Observation:
    """One run at one rung. `rho` achieved; `start` the same run's value before training (NaN if not evaluated)."""

    model: str
    allocation: str
    seed: int
    value: float
    rho: float
    rho_planned: float
    start: float = math.nan
    c_total: float = math.nan
    c_error: float = math.nan
    simulated: bool = False


@dataclass(frozen=True)
class Cell:
    """Runs of one model and allocation at one rung: `values` and `rhos` by seed, their means; `sd` None below two."""

    model: str
    allocation: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    rhos: tuple[float, ...]
    mean: float
    sd: float | None
    rho: float
    rho_planned: float
    gain: float
    c_total: float
    c_error: float
    simulated: bool

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def name(self) -> str:
        """Model, allocation and the update fraction that was in fact reached."""
        return f"{self.model} at {self.allocation} (achieved rho {fixed(self.rho)})"


@dataclass(frozen=True)
class Difference:
    """Mean of `cell` minus mean of `other` (None: minus the same runs before training).

    `low`, `high`: simultaneous 95% interval; `p`: uncorrected; `p_holm`: corrected over the rung's family. All None
    where the verdict is undetermined.
    """

    cell: Cell
    other: Cell | None
    value: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    verdict: str


@dataclass(frozen=True)
class Rung:
    """Comparisons at one budget within one setting.

    `sd`, `df`: pooled over cells (None, 0 with one seed per cell). `family`: tests that the correction counts.
    `best`, `edges`, `starts`: by model; an edge optimum is only a bound. `allocations`: each model's best against its
    other allocations. `models`: the best cell against the best cell of each other model. `gains`: each model's best
    against its own value before training.
    """

    setting: str
    budget: float
    cells: tuple[Cell, ...]
    sd: float | None
    df: int
    family: int
    best: dict[str, Cell]
    edges: dict[str, Edge]
    starts: dict[str, float]
    allocations: tuple[Difference, ...]
    models: tuple[Difference, ...]
    gains: tuple[Difference, ...]

    @property
    def winner(self) -> Cell:
        """The cell with the highest mean."""
        return max(self.cells, key=lambda cell: cell.mean)

    @property
    def confidence(self) -> float | None:
        """Level of each single interval, so that all of the rung's together hold with 95%."""
        return 1 - ALPHA / self.family if self.family else None

    def against_best(self, cell: Cell) -> Difference | None:
        """The comparison of its model's best with `cell`; None for the best itself."""
        return next((d for d in self.allocations if d.other is cell), None)


def pooled_sd(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """Standard deviation within groups, and its degrees of freedom.

    s^2 = sum_c sum_i (y_ci - mean_c)^2 / sum_c (n_c - 1), the error variance of a one-way layout (Student 1908 for one
    group). (None, 0) when no group has two values.
    """
    arrays = [np.asarray(group, dtype=float) for group in groups]
    df = sum(len(a) - 1 for a in arrays)
    if df < 1:
        return None, 0
    return math.sqrt(sum(float(((a - a.mean()) ** 2).sum()) for a in arrays) / df), df


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down corrected p values, in the order given.

    Sorted ascending p_(1..m): corrected p_(i) = max over j <= i of min(1, (m - j + 1) p_(j)). Rejecting where it is at
    most alpha keeps the chance of any false rejection at or below alpha, whatever the dependence (Holm 1979).
    """
    corrected = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = running
    return corrected


def compare(observations: Sequence[Observation], setting: str = "", budget: float = math.nan) -> Rung:
    """Comparisons between the cells of one rung.

    Tests are two-sided Student t tests with the pooled seed spread of the rung: t = difference / (s sqrt(1/n + 1/n')).
    Which cell is best is read from the same values that are then compared, so the family that Holm's correction counts
    is every pair of cells of the rung, and every cell's gain over its start: whichever cell comes out best, its
    comparisons are among them. Intervals are simultaneous over that family (each at 1 - 0.05 / family); one whose
    difference Holm's method finds, which is a little sharper, ends at zero at worst (Strassburger and Bretz 2008,
    "Compatible simultaneous lower confidence bounds for the Holm procedure"). Gains use the pooled spread of gains.
    Without two seeds in any cell, or with no spread at all, nothing is claimed.
    """
    from scipy import stats

    cells, gains = _cells(observations)
    if not cells:
        raise ValueError("no observations")
    sd, df = pooled_sd([cell.values for cell in cells])
    started = [(cell, gain) for cell, gain in zip(cells, gains, strict=True) if gain]
    gain_sd, gain_df = pooled_sd([gain for _, gain in started])
    scale = 1e-12 * max(1.0, max(abs(cell.mean) for cell in cells))

    tests: dict[tuple[int, int], tuple[float, float, int]] = {}  # (difference, its standard error, df)
    position = {id(cell): i for i, cell in enumerate(cells)}
    if sd is not None and sd > scale:
        for i, j in combinations(range(len(cells)), 2):
            error = sd * math.sqrt(1 / cells[i].n + 1 / cells[j].n)
            tests[i, j] = (cells[i].mean - cells[j].mean, error, df)
    if gain_sd is not None and gain_sd > scale:
        for cell, gain in started:
            i = position[id(cell)]
            tests[i, -1] = (float(np.mean(gain)), gain_sd / math.sqrt(len(gain)), gain_df)
    table = np.array(list(tests.values()), dtype=float).reshape(-1, 3)
    p_values = (2 * stats.t.sf(np.abs(table[:, 0] / table[:, 1]), table[:, 2])).tolist()
    corrected = dict(zip(tests, holm(p_values), strict=True))
    plain = dict(zip(tests, p_values, strict=True))

    def difference(cell: Cell, other: Cell | None) -> Difference:
        i, j = position[id(cell)], -1 if other is None else position[id(other)]
        value = cell.gain if other is None else cell.mean - other.mean
        key = (i, j) if (i, j) in tests else (j, i)
        if key not in tests:
            spread = gain_sd if other is None else sd
            verdict = ONE_SEED if spread is None else NO_SPREAD
            if other is None and not math.isfinite(cell.gain):
                verdict = NO_START
            return Difference(cell, other, value, None, None, None, None, verdict)
        _, error, degrees = tests[key]
        half = float(stats.t.isf(ALPHA / len(tests) / 2, degrees)) * error
        low, high = value - half, value + half
        verdict = WITHIN
        if corrected[key] <= ALPHA:
            verdict = EXCEEDS
            low, high = (max(low, 0.0), high) if value > 0 else (low, min(high, 0.0))
        return Difference(cell, other, value, low, high, plain[key], corrected[key], verdict)

    models = list(dict.fromkeys(cell.model for cell in cells))
    best = {m: max((c for c in cells if c.model == m), key=lambda c: c.mean) for m in models}
    winner = max(cells, key=lambda cell: cell.mean)
    return Rung(
        setting=setting,
        budget=budget,
        cells=tuple(cells),
        sd=sd,
        df=df,
        family=len(tests),
        best=best,
        edges={m: _edge(best[m], [c for c in cells if c.model == m]) for m in models},
        starts={m: _mean(o.start for o in observations if o.model == m) for m in models},
        allocations=tuple(
            difference(best[m], c) for m in models for c in cells if c.model == m and c is not best[m]
        ),
        models=tuple(difference(winner, best[m]) for m in models if m != winner.model),
        gains=tuple(difference(best[m], None) for m in models),
    )  # fmt: skip


def _mean(values: Iterable[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else math.nan


def _cells(observations: Sequence[Observation]) -> tuple[list[Cell], list[list[float]]]:
    """Cells, models in order of appearance and allocations by planned rho; and each cell's gains by run.

    Runs of one cell that share a seed are averaged first: they are no independent evidence of the seed's effect.
    """
    runs: dict[tuple[str, str], dict[int, list[Observation]]] = defaultdict(lambda: defaultdict(list))
    for o in observations:
        runs[o.model, o.allocation][o.seed].append(o)
    models = list(dict.fromkeys(o.model for o in observations))
    built: list[tuple[Cell, list[float]]] = []
    for (model, allocation), by_seed in runs.items():
        seeds = tuple(sorted(by_seed))
        values = tuple(_mean(o.value for o in by_seed[s]) for s in seeds)
        flat = [o for s in seeds for o in by_seed[s]]
        gains = [_mean(o.value - o.start for o in by_seed[s]) for s in seeds]
        gains = [g for g in gains if math.isfinite(g)]
        cell = Cell(
            model=model,
            allocation=allocation,
            seeds=seeds,
            values=values,
            rhos=tuple(_mean(o.rho for o in by_seed[s]) for s in seeds),
            mean=float(np.mean(values)),
            sd=float(np.std(values, ddof=1)) if len(values) > 1 else None,
            rho=_mean(o.rho for o in flat),
            rho_planned=_mean(o.rho_planned for o in flat),
            gain=_mean(gains),
            c_total=_mean(o.c_total for o in flat),
            c_error=_mean(o.c_error for o in flat),
            simulated=any(o.simulated for o in flat),
        )
        built.append((cell, gains))
    built.sort(key=lambda item: (models.index(item[0].model), item[0].rho_planned, item[0].allocation))
    return [cell for cell, _ in built], [gains for _, gains in built]


def _edge(best: Cell, cells: Sequence[Cell]) -> Edge:
    if len(cells) == 1:
        return "only"
    others = [cell.rho for cell in cells if cell is not best]
    if best.rho <= min(others):
        return "low"
    return "high" if best.rho >= max(others) else ""


def default_set(runs: pd.DataFrame) -> str:
    """`heldout` where it was evaluated, else the first evaluation set of the table."""
    sets = list(dict.fromkeys(runs["set"]))
    return "heldout" if "heldout" in sets else str(sets[0])


def compare_runs(runs: pd.DataFrame, value: str = "pass@1", evaluation_set: str | None = None) -> list[Rung]:
    """One `Rung` per (setting, budget) of a runs table (`analysis.load`), settings in order, budgets ascending.

    `value`: one of `VALUES`. Runs are grouped by the budget itself, so only runs of equal planned compute meet. Runs
    without this value are left out. Raises `UserError` for an unknown value or set, or if nothing is left.
    """
    if value not in VALUES:
        raise UserError(f"value {value!r}: {choices(value, VALUES)}")
    sets = list(dict.fromkeys(runs["set"]))
    if not sets:
        raise UserError("no finished point yet, so there is nothing to compare")
    name = default_set(runs) if evaluation_set is None else evaluation_set
    if name not in sets:
        raise UserError(f"evaluation set {name!r}: {choices(name, sets)}")
    rows = runs[(runs["set"] == name) & runs[value].notna()]
    starts = dict(zip(rows.loc[rows["rung"] == 0, "point"], rows.loc[rows["rung"] == 0, value], strict=True))
    trained = rows[rows["rung"] > 0]
    rungs: list[Rung] = []
    for setting in dict.fromkeys(trained["setting"]):
        of_setting = trained[trained["setting"] == setting]
        for budget in sorted(set(of_setting["budget"])):
            observations = [
                Observation(
                    model=str(row["model"]),
                    allocation=str(row["allocation"]),
                    seed=int(row["seed"]),
                    value=float(row[value]),
                    rho=float(row["rho"]),
                    rho_planned=float(row["rho_planned"]),
                    start=float(starts.get(row["point"], math.nan)),
                    c_total=float(row["c_total"]),
                    c_error=float(row["c_error"]),
                    simulated=bool(row["simulated"]),
                )
                for row in of_setting[of_setting["budget"] == budget].to_dict("records")
            ]
            rungs.append(compare(observations, setting, float(budget)))
    if not rungs:
        raise UserError(f"no finished point has {value} on {name!r}")
    return rungs


def largest(rungs: Sequence[Rung]) -> list[Rung]:
    """The rung of the largest budget of each setting."""
    return list({rung.setting: rung for rung in sorted(rungs, key=lambda r: r.budget)}.values())


def edge_text(edge: Edge) -> str:
    """What an edge optimum means, as a clause; empty for an interior one."""
    if edge == "only":
        return "the only allocation tested"
    return f"at the {edge} edge of the tested rho range: only a bound" if edge else ""


def interval_text(difference: Difference) -> str:
    """The simultaneous interval, or nothing where there is none."""
    if difference.low is None or difference.high is None:
        return ""
    return f"{signed(difference.low)} to {signed(difference.high)}"


def verdict_text(difference: Difference) -> str:
    """Verdict with its interval and corrected p value."""
    if difference.p_holm is None:
        return difference.verdict
    p = p_text(difference.p_holm)
    sign = "" if p.startswith("<") else "= "
    return f"{difference.verdict}: 95% interval {interval_text(difference)}, corrected p {sign}{p}"


def cell_verdict(rung: Rung, cell: Cell) -> str:
    """What the table says about a cell: best (and whether at an edge), or how far it falls short of the best."""
    difference = rung.against_best(cell)
    if difference is not None:
        return difference.verdict
    edge = edge_text(rung.edges[cell.model])
    return f"best of {cell.model}" + (f", {edge}" if edge else "")


def sentence(rung: Rung, value: str = "pass@1") -> str:
    """Which model and allocation won at this budget, by how much, whether this exceeds the seed spread; flags edges."""
    top = rung.winner
    ahead = []
    if rung.models:
        d = _nearest(rung.models)
        assert d.other is not None
        ahead.append(
            f"{fixed(d.value)} above {d.other.model} at {d.other.allocation} (achieved rho {fixed(d.other.rho)}; "
            f"{d.verdict})"
        )
    own = [d for d in rung.allocations if d.cell is top]
    if own:
        d = _nearest(own)
        assert d.other is not None
        ahead.append(
            f"{fixed(d.value)} above its own {d.other.allocation} (achieved rho {fixed(d.other.rho)}; {d.verdict})"
        )
    parts = [f"At {flops_text(rung.budget)}, {top.name} has the highest {value}, {fixed(top.mean)}"]
    parts[0] += f": {' and '.join(ahead)}" if ahead else "; it is the only cell tested"
    edge = rung.edges[top.model]
    if edge == "only" and ahead:
        parts.append(f"{top.allocation} is the only allocation tested for {top.model}")
    elif edge and ahead:
        parts.append(f"{top.allocation} is {edge_text(edge)}")
    if rung.sd is None:
        parts.append("With one seed per cell there is no seed spread, so no difference is established")
    return ". ".join(parts) + "."


def details(rung: Rung, value: str = "pass@1") -> list[str]:
    """The numbers behind `sentence`: one line a comparison of the winner."""
    top = rung.winner
    runs = "one seed" if top.n == 1 else f"mean of {top.n} seeds"
    lines = [f"{top.name}: {value} {fixed(top.mean)}, {runs}"]
    for among, kind in (
        (rung.models, "next model"),
        ([d for d in rung.allocations if d.cell is top], "next allocation"),
    ):
        if among:
            d = _nearest(among)
            assert d.other is not None
            lines.append(f"{kind}: {d.other.name}, {fixed(d.value)} lower; {verdict_text(d)}")
    gain = next(d for d in rung.gains if d.cell is top)
    lines.append(f"gain over its own value before training: {signed(gain.value)}; {verdict_text(gain)}")
    return lines


def _nearest(differences: Sequence[Difference]) -> Difference:
    return min(differences, key=lambda d: d.value)
