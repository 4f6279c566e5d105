"""Write a sweep's report: tables, figures, `summary.json` and one self-contained page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from analysis import figures, page
from analysis.findings import Findings, summary
from race_sweeps.errors import UserError
from race_sweeps.folder import write_atomic


def write_report(findings: Findings, out: Path) -> Path:
    """Write `runs.csv`, `runs.parquet`, `summary.json`, the figures (PNG) and `report.html` into `out`.

    Returns the path of the page, which is written last. Raises `UserError` when `out` cannot be written.
    """
    sweep = findings.sweep
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "runs.csv", sweep.runs.to_csv(index=False))
        buffer = io.BytesIO()
        sweep.runs.to_parquet(buffer, index=False)
        (out / "runs.parquet").write_bytes(buffer.getvalue())
        write_atomic(out / "summary.json", json.dumps(summary(findings), indent=1, allow_nan=False) + "\n")
        settings = list(dict.fromkeys(rung.setting for rung in findings.rungs))
        for number, setting in enumerate(settings, 1):
            suffix = f"-{number}-{_slug(setting)}" if len(settings) > 1 else ""
            for name, figure in _whole_figures(findings, setting).items():
                (out / f"{name}{suffix}.png").write_bytes(figures.png(figure))
        target = out / "report.html"
        write_atomic(target, page.html_page(findings))
    except OSError as error:
        raise UserError(f"cannot write the report into {out}: {error.strerror or error}; give another --out") from None
    return target


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40]


def _whole_figures(findings: Findings, setting: str) -> dict[str, Any]:
    rungs = [rung for rung in findings.rungs if rung.setting == setting]
    simulated = findings.sweep.simulated
    results = findings.sweep.results
    return {
        "isoflop": figures.isoflop(rungs, findings.value, simulated),
        "compute_split": figures.compute_split(
            results[results["setting"] == setting], figures.models_of(rungs), simulated
        ),
        "compute_performance": figures.compute_performance(rungs, findings.value, simulated),
    }
