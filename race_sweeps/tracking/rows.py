"""A run's folder as rows for a tracker: one per optimizer step, a pure function of the files."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from race_sweeps import config as configuration
from race_sweeps import ledger, manifest
from race_sweeps.config import RunConfig
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder, read_rows
from race_sweeps.ledger import PHASES, Ledger, Row, Totals

X_AXIS = "flops/total"
STEP = "ledger/step"
EXACT_TOTAL = "ledger/total"
EXACT_ROWS = "ledger/rows"
_COUNTED = tuple(phase for phase in PHASES if phase != "eval")
_FROM_LEDGER = ("v", "step", "rho", "flops_total", *(f"flops_{phase}" for phase in _COUNTED))
_NOT_METRICS = ("v", "step", "rung", "set", "budget", "flops", "rho", "seconds", "time")


@dataclass(frozen=True)
class Identity:
    """What a tracker calls the run. `config`: the resolved configuration, and `planned`, `git`, `versions`."""

    id: str
    group: str
    job_type: str
    tags: list[str]
    config: dict[str, Any]


@dataclass(frozen=True)
class StepRow:
    """`values`: numbers, and exact integers as text. `rollouts`: a sample of completions by column, if one was kept."""

    step: int
    values: dict[str, float | int | str]
    rollouts: dict[str, list[Any]] | None = None


def load_config(folder: RunFolder) -> RunConfig:
    return configuration.load(folder.config.read_text(encoding="utf-8"))


def identity(folder: RunFolder, config: RunConfig) -> Identity:
    """Name, grouping, tags and configuration of the run in `folder`."""
    sweep = manifest.read(folder.path.parents[1]) if len(folder.path.parents) > 1 else {}
    simulated = config.trainer.kind == "simulated" or _simulated(folder, sweep)
    try:
        planned = json.loads(folder.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from race_sweeps.plan import plan

        planned = plan(config).to_json()
    return Identity(
        id=folder.point_id,
        group=config.sweep,
        job_type=config.stage,
        tags=[config.model.name, config.reward.name, config.update_fraction.name, *["simulated"] * simulated],
        config={
            **configuration.to_dict(config),
            "planned": planned,
            "point": folder.point_id,
            "simulated": simulated,
            "git": sweep.get("git") or {"revision": None, "dirty": None},
            "versions": sweep.get("versions") or {},
        },
    )


def _simulated(folder: RunFolder, sweep: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(folder.result.read_text(encoding="utf-8")).get("simulated", False))
    except (OSError, ValueError, AttributeError):
        return bool(sweep.get("simulated", False))


def rows(folder: RunFolder, after: int, until: int | None = None) -> Iterator[StepRow]:
    """Rows of the steps in (after, until], in order; `after` -1 begins with the evaluation before training, `until`
    None ends with the last step there is. Raises `UserError` where a file is damaged."""
    book = ledger.read(folder.ledger)
    steps: dict[int, list[Row]] = defaultdict(list)
    for row in book.rows:
        steps[row.step].append(row)
    metrics = {row["step"]: row for row in read_rows(folder.metrics)}
    evals: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for item in read_rows(folder.evals):
        evals[item["step"]].append(item)
    totals = Totals()
    for step in sorted(steps):
        if until is not None and step > until:
            return
        for row in steps[step]:
            totals.add(row)
        if step > after:
            attempt = max(row.attempt for row in steps[step])
            values = {
                STEP: step,
                **_ledger(steps[step], totals),
                "flops/lost": _lost_before(book, attempt),
                **_metrics(metrics.get(step, {})),
                **_evaluations(evals.get(step, [])),
            }
            yield StepRow(step, _clean(values), _rollouts(folder, step) if step in evals else None)


def _lost_before(book: Ledger, attempt: int) -> int:
    """What earlier attempts had lost: known when the row was made, so no later restart changes it."""
    return sum(row.flops.model for row in book.lost if row.phase != "eval" and row.attempt < attempt)


def _ledger(step: list[Row], totals: Totals) -> dict[str, Any]:
    """Cumulative FLOPs; tokens and seconds of this step; every integer again as text, because trackers keep numbers as
    floats, which are exact only to 2^53."""
    executed = {phase: totals.flops[phase].executed for phase in PHASES}
    values: dict[str, Any] = {f"flops/{phase}": totals.model(phase) for phase in PHASES}
    values |= {X_AXIS: totals.total, "flops/rho": totals.rho}
    values |= {f"executed/{phase}": executed[phase] for phase in PHASES}
    values["executed/total"] = sum(executed[phase] for phase in _COUNTED)
    for row in step:
        values[f"seconds/{row.phase}"] = row.seconds
        values |= {f"tokens/{row.phase}_{kind}": count for kind, count in vars(row.tokens).items() if count}
    exact = {row.phase: {**row.flops._asdict(), "tokens": vars(row.tokens), "rows": row.rows} for row in step}
    values[EXACT_ROWS] = json.dumps(exact, separators=(",", ":"))
    values[EXACT_TOTAL] = str(totals.total)
    return values


def _metrics(row: dict[str, Any]) -> dict[str, Any]:
    def name(key: str) -> str:
        if key == "reward":
            return "reward/mean"
        return key if "/" in key else f"lengths/{key}" if "length" in key else f"train/{key}"

    return {name(key): value for key, value in row.items() if key not in _FROM_LEDGER}


def _evaluations(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of each set, and once more under their rung: one number per run and rung, to compare runs by."""
    values: dict[str, Any] = {}
    for row in found:
        for key, value in row.items():
            if key not in _NOT_METRICS:
                values[f"eval/{row['set']}/{key}"] = value
                values[f"rung/{row['rung']}/{row['set']}/{key}"] = value
        values |= {f"rung/{row['rung']}/rho": row["rho"], f"rung/{row['rung']}/flops": row["flops"]["total"]}
        values["rung/number"] = row["rung"]
    return values


def _clean(values: dict[str, Any]) -> dict[str, float | int | str]:
    """Only numbers, and the two texts: neither blanks nor lists nor anything a model wrote."""

    def usable(key: str, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return key in (EXACT_ROWS, EXACT_TOTAL) or (number and (isinstance(value, int) or math.isfinite(value)))

    return {key: value for key, value in values.items() if usable(key, value)}


def _rollouts(folder: RunFolder, step: int) -> dict[str, list[Any]] | None:
    path = folder.rollouts / f"step-{step:06d}.parquet"
    if not path.exists():
        return None
    from pyarrow import ArrowException, parquet

    try:
        columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it, it is only a sample") from None
    return columns
