"""`python -m analysis isoflop FILE.csv`: reads any IsoFLOP table, fits it (`analysis.isoflop`) and says what it found."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.isoflop import Analysis, Isoflop, Scale, Unclustered, analyse
from race_sweeps.errors import UserError, choices

MEANING = {
    "interior": "inside the tested range",
    "open": "its interval reaches an end of the tested range",
    "edge": "at an end of the tested range: the optimum lies there or beyond; test further out",
    "flat": "no effect of x that could be told from noise",
    "few": "too few different x for a fit",
}


@dataclass(frozen=True)
class Table:
    """The usable rows. `lines`: their line in the file (the header is line 1); `missing`: rows left out because a cell
    was empty, by column."""

    budget: NDArray[np.float64]
    x: NDArray[np.float64]
    value: NDArray[np.float64]
    group: NDArray[np.object_]
    lines: NDArray[np.intp]
    missing: Mapping[str, int]


def read(file: Path, budget: str, x: str, value: str, group: str | None) -> Table:
    """Read the columns. Raises `UserError` for a column that is not there, and for a cell that is no number, or no
    positive one where a logarithm is taken, with its line; empty cells leave their row out and are counted."""
    try:
        frame = pd.read_csv(file, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise UserError(f"{file}: cannot be read as CSV ({str(error).splitlines()[0]})") from None
    wanted = [budget, x, value, *([group] if group else [])]
    for column in wanted:
        if column not in frame.columns:
            raise UserError(f"{file}: no column {column!r}; {choices(column, frame.columns)}")
    frame.index += 2
    stripped = frame[wanted].apply(lambda cells: cells.str.strip())
    empty = stripped.apply(lambda cells: cells.str.lower().isin(["", "nan", "na", "null"]))
    kept = stripped[~empty.any(axis=1)]
    numbers: dict[str, NDArray[np.float64]] = {}
    for column in (budget, x, value):
        found = pd.to_numeric(kept[column], errors="coerce").to_numpy(dtype=float)
        bad = ~np.isfinite(found) if column == value else ~(np.isfinite(found) & (found > 0))
        if bad.any():
            line = kept.index[bad][0]
            what = "a number" if column == value else "a positive number"
            raise UserError(f"{file}: line {line}: {column}={kept[column].loc[line]!r}: must be {what}")
        numbers[column] = found
    if not len(kept):
        raise UserError(f"{file}: no row has {', '.join(wanted)}")
    return Table(
        budget=numbers[budget],
        x=numbers[x],
        value=numbers[value],
        group=kept[group].to_numpy(dtype=object) if group else np.full(len(kept), "", dtype=object),
        lines=kept.index.to_numpy(dtype=int),
        missing={column: int(empty[column].sum()) for column in wanted if empty[column].any()},
    )


def scale_of(table: Table, wanted: Literal["auto", "log", "logit"], x: str) -> Scale:
    """The scale of x: by default logit for shares, log for anything else."""
    share = bool((table.x < 1).all())
    if wanted == "logit" and not share:
        raise UserError(f"--scale logit: {x} reaches {table.x.max():g}; shares lie between 0 and 1; use --scale log")
    return ("logit" if share else "log") if wanted == "auto" else wanted


def run(options: argparse.Namespace) -> int:
    """The command; its exit status."""
    table = read(options.file, options.budget, options.x, options.value, options.group)
    scale = scale_of(table, options.scale, options.x)
    if options.tolerance is not None and not 0 < options.tolerance < 1:
        raise UserError(f"--tolerance {options.tolerance:g}: a share between 0 and 1, for example 0.1")
    fitted: dict[str, tuple[Analysis, Table]] = {}
    for name in dict.fromkeys(table.group):
        chosen = table.group == name
        part = Table(
            table.budget[chosen], table.x[chosen], table.value[chosen], table.group[chosen], table.lines[chosen], {}
        )
        try:
            found = analyse(
                part.budget, part.x, part.value, minimize=options.minimize, scale=scale, tolerance=options.tolerance,
                drop_outliers=not options.keep_outliers,
            )  # fmt: skip
        except Unclustered as error:
            raise UserError(
                f"{options.file}: {options.budget}: {error}; give --tolerance, the share by which budgets of one curve "
                "differ, for example --tolerance 0.05"
            ) from None
        fitted[str(name)] = found, part
    if options.json:
        print(json.dumps(_json(fitted, table, scale), indent=1, allow_nan=False))
    else:
        _show(fitted, table, scale, options)
    return 0


def _json(fitted: Mapping[str, tuple[Analysis, Table]], table: Table, scale: Scale) -> dict[str, Any]:
    def plain(values: dict[str, Any]) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    def budget(b: Isoflop, part: Table) -> dict[str, Any]:
        return plain(
            {
                "budget": b.budget, "spread": b.spread, "rows": len(b.rows), "places": b.places, "degree": b.degree,
                "status": b.optimum.status, "edge": b.optimum.edge or None, "x": b.x, "low": b.low, "high": b.high,
                "value": b.value, "outlier_lines": [int(part.lines[i]) for i in b.outliers],
            }
        )  # fmt: skip

    return {
        "scale": scale,
        "rows": len(table.x),
        "left_out": dict(table.missing),
        "groups": [
            {
                "group": name,
                "budgets": [budget(b, part) for b in found.budgets],
                "power_law": plain(asdict(found.law)) if found.law else None,
                "saturation": plain(asdict(found.saturation)) if found.saturation else None,
            }
            for name, (found, part) in fitted.items()
        ],
    }


def _show(
    fitted: Mapping[str, tuple[Analysis, Table]], table: Table, scale: Scale, options: argparse.Namespace
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Shown
    from rich.text import Text

    from analysis.units import printable

    console = Console()
    wide = console if console.is_terminal else Console(width=160)
    for column, times in table.missing.items():
        wide.print(Text(printable(f"{times} rows left out: {column} is empty")))
    for name, (found, part) in fitted.items():
        title = f"{options.group}={name}" if options.group else f"{len(table.x)} rows; x on a {scale} scale"
        shown = Shown(title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD)
        for head in (
            options.budget,
            "rows",
            f"optimal {options.x}",
            "90% interval",
            options.value,
            "degree",
            "outliers",
        ):
            shown.add_column(Text(printable(head)), justify="right", no_wrap=True)
        shown.add_column("")
        for b in found.budgets:
            lines = ",".join(str(part.lines[i]) for i in b.outliers[:4]) + (",..." if len(b.outliers) > 4 else "")
            known = math.isfinite(b.x)
            shown.add_row(
                f"{b.budget:.4g}", str(len(b.rows)), f"{b.x:.4g}" if known else "-",
                f"{b.low:.4g} to {b.high:.4g}" if known else "-", f"{b.value:.4g}" if known else "-", str(b.degree),
                f"{len(b.outliers)} (lines {lines})" if len(b.outliers) else "0",
                MEANING[b.optimum.status],
            )  # fmt: skip
        wide.print(shown)
        wide.print(Text(printable(_law(found, scale, options.x, options.budget))))


def _law(found: Analysis, scale: Scale, x: str, budget: str) -> str:
    if found.law is None:
        return "no law across budgets: it needs three budgets with an optimum inside the tested range"
    law = found.law
    name = x if scale == "log" else f"odds of {x}"
    text = (
        f"optimal {name} ~ {budget}^{law.exponent:.3f} (90% interval {law.low:.3f} to {law.high:.3f}; "
        f"{law.budgets} budgets, spread between them beyond their own errors {law.tau:.2g} in ln x)"
    )
    if found.saturation is not None:
        s = found.saturation
        text += f"; best value changes by {s.slope:.3g} per factor of ten in {budget}"
    return text
