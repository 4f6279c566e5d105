"""What can be said about a sweep: its comparisons, statements, notes, and all of it as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from analysis.compare import Cell, Difference, Rung, compare_runs, default_set, details, largest, sentence
from analysis.load import RESULT_COLUMNS, Sweep
from analysis.units import flops_text, percent
from race_sweeps.errors import UserError

# Runs of one rung whose achieved compute differs from it by more than this are pointed out.
UNEVEN = 0.05


@dataclass(frozen=True)
class Findings:
    """What is said about a sweep: comparisons of every rung, the value and evaluation set they use."""

    sweep: Sweep
    value: str
    evaluation_set: str
    rungs: list[Rung]

    @property
    def sentences(self) -> list[str]:
        """The statement at the largest budget, one for each setting."""
        top = largest(self.rungs)
        mark = "SIMULATED: " if self.sweep.simulated else ""
        return [
            mark + (f"[{rung.setting}] " if len(top) > 1 else "") + sentence(rung, self.value) + self._open()
            for rung in top
        ]

    def _open(self) -> str:
        done, total = len(self.sweep.results), self.sweep.points
        return f" Only {done} of {total} points are finished." if done < total else ""

    @property
    def details(self) -> list[str]:
        """The numbers behind the sentences."""
        return [line for rung in largest(self.rungs) for line in details(rung, self.value)]

    @property
    def notes(self) -> list[str]:
        """The sweep's notes, and those that follow from the comparisons."""
        notes = list(self.sweep.notes)
        for rung in self.rungs:
            uneven = sorted((c for c in rung.cells if abs(c.c_error) > UNEVEN), key=lambda c: -abs(c.c_error))
            if uneven:
                names = ", ".join(f"{c.model} {c.allocation} {percent(c.c_error, 0)}" for c in uneven[:3])
                notes.append(
                    f"at {flops_text(rung.budget)}, achieved compute is off the rung by more than {UNEVEN:.0%} in "
                    f"{len(uneven)} of {len(rung.cells)} cells, most in: {names}"
                )
        rows = self.sweep.runs[self.sweep.runs["set"] == self.evaluation_set]
        for column in ("problems", "samples", "temperature"):
            kinds = sorted(set(rows[column].dropna()))
            if len(kinds) > 1:
                notes.append(
                    f"{self.evaluation_set} was evaluated with different {column}: {', '.join(map(str, kinds))}"
                )
        return notes


def find(sweep: Sweep, value: str = "pass@1", evaluation_set: str | None = None) -> Findings:
    """Compare the finished runs of `sweep`. Raises `UserError` if none is finished, or for an unknown value or set."""
    if sweep.runs.empty:
        first = f"; first damaged point: {sweep.skipped[0].reason}" if sweep.skipped else ""
        raise UserError(
            f"{sweep.folder}: no finished point yet ({len(sweep.unfinished)} unfinished, {len(sweep.skipped)} damaged)"
            f"{first}"
        )
    name = default_set(sweep.runs) if evaluation_set is None else evaluation_set
    return Findings(sweep, value, name, compare_runs(sweep.runs, value, name))


def summary(findings: Findings) -> dict[str, Any]:
    """The report's content as JSON: strings, finite numbers and null."""
    sweep = findings.sweep
    results = sweep.results
    sums = {c: float(results[c].sum()) for c in RESULT_COLUMNS if c.startswith(("c_", "executed_", "paper_"))}
    content = {
        "v": 1,
        "sweep": sweep.name,
        "simulated": sweep.simulated,
        "value": findings.value,
        "set": findings.evaluation_set,
        "sentences": findings.sentences,
        "details": findings.details,
        "points": {"finished": len(results), "unfinished": len(sweep.unfinished), "skipped": len(sweep.skipped)},
        "rungs": [_rung_json(rung) for rung in findings.rungs],
        "compute": {
            **sums,
            "lost": float(results["lost_flops"].sum()),
            "eval": float(results["eval_flops"].sum()),
        },
        "unfinished": [u._asdict() for u in sweep.unfinished],
        "skipped": [s._asdict() for s in sweep.skipped],
        "notes": findings.notes,
    }
    cleaned: dict[str, Any] = _finite(content)
    return cleaned


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rung_json(rung: Rung) -> dict[str, Any]:
    def place(cell: Cell) -> dict[str, Any]:
        return {"model": cell.model, "allocation": cell.allocation, "rho": cell.rho}

    def line(d: Difference) -> dict[str, Any]:
        other = None if d.other is None else place(d.other)
        numbers = {"difference": d.value, "low": d.low, "high": d.high, "p": d.p, "p_holm": d.p_holm}
        return {"cell": place(d.cell), "minus": other, **numbers, "verdict": d.verdict}

    return {
        "setting": rung.setting,
        "budget": rung.budget,
        "pooled_sd": rung.sd,
        "df": rung.df,
        "family": rung.family,
        "winner": place(rung.winner),
        "best": {m: {**place(c), "edge": rung.edges[m], "start": rung.starts[m]} for m, c in rung.best.items()},
        "cells": [
            {
                **place(c), "rho_planned": c.rho_planned, "n": c.n, "seeds": list(c.seeds), "values": list(c.values),
                "mean": c.mean, "sd": c.sd, "gain": c.gain, "c_total": c.c_total, "c_error": c.c_error,
                "simulated": c.simulated,
            }
            for c in rung.cells
        ],
        "allocations": [line(d) for d in rung.allocations],
        "models": [line(d) for d in rung.models],
        "gains": [line(d) for d in rung.gains],
    }  # fmt: skip
