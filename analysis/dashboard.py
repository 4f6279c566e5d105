"""A W&B workspace and report for a sweep: the components against FLOPs, not steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder, read_rows, write_atomic
from race_sweeps.ledger import PHASES
from race_sweeps.tracking.rows import X_AXIS, load_config

COMPONENTS = tuple(phase for phase in PHASES if phase != "eval")
PLANNED_RHO = "planned.rho"


@dataclass(frozen=True)
class Contents:
    """What the sweep's runs hold: `sets` of evaluation, number of `rungs` after training began, common `judge`."""

    sweep: str
    project: str
    entity: str | None
    sets: list[str]
    rungs: int
    judge: bool


def contents(folder: Path) -> Contents:
    """Read from the points' folders. Raises `UserError` when no point was evaluated."""
    points = [RunFolder(path) for path in sorted((folder / "points").glob("*")) if (path / "config.yaml").is_file()]
    found = [row for point in points for row in read_rows(point.evals)]
    if not found:
        raise UserError(f"{folder}: no point was evaluated yet; a dashboard needs at least one")
    config = load_config(points[0])
    return Contents(
        sweep=config.sweep,
        project=config.tracking.project,
        entity=config.tracking.entity,
        sets=list(dict.fromkeys(str(row["set"]) for row in found)),
        rungs=max(int(row["rung"]) for row in found),
        judge=any("judge" in row for row in found),
    )


def panels(what: Contents) -> dict[str, list[Any]]:
    """wandb-workspaces panels by section."""
    import wandb_workspaces.reports.v2 as wr

    def config(key: str) -> Any:
        return wr.Config(key)

    def summary(key: str) -> Any:
        return wr.SummaryMetric(key)

    x = {"x": X_AXIS, "title_x": "C_total, FLOPs"}
    split = [
        wr.LinePlot(title="Compute by component", y=[f"flops/{c}" for c in COMPONENTS], plot_type="stacked-area", **x),
        wr.LinePlot(title="Share of each component", y=[f"flops/{c}" for c in COMPONENTS], plot_type="pct-area", **x),
        wr.LinePlot(title="Executed and lost", y=["executed/total", "flops/lost", "flops/eval"], **x),
    ]
    value = [wr.LinePlot(title=f"pass@1 on {name}", y=[f"eval/{name}/pass@1"], **x) for name in what.sets]
    value.append(wr.LinePlot(title="Training reward", y=["reward/mean"], **x))
    rho = [
        wr.LinePlot(title="Update fraction on the way", y=["flops/rho"], range_y=(0.0, 1.0), **x),
        wr.ScatterPlot(title="Achieved against planned", x=config(PLANNED_RHO), y=summary("flops/rho")),
    ]
    isoflop = [
        wr.ScatterPlot(
            title=f"pass@1 on {name} against rho, rung {rung}",
            x=summary(f"rung/{rung}/rho"),
            y=summary(f"rung/{rung}/{name}/pass@1"),
        )
        for name in what.sets
        for rung in range(1, what.rungs + 1)
    ]
    sections = {"Compute": split, "Value": value, "Update fraction": rho, "IsoFLOP": isoflop}
    if what.judge:
        sections["Judge"] = [
            wr.ScatterPlot(
                title=f"Common judge against pass@1 on {name}",
                x=summary(f"rung/{what.rungs}/{name}/pass@1"),
                y=summary(f"rung/{what.rungs}/{name}/judge"),
            )
            for name in what.sets
        ]
    return sections


def workspace(what: Contents, entity: str) -> Any:
    """A saved view of the project, restricted to the sweep's runs."""
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=entity,
        project=what.project,
        name=f"Sweep {what.sweep}",
        sections=[ws.Section(name=name, panels=found, is_open=True) for name, found in panels(what).items()],
        settings=ws.WorkspaceSettings(x_axis=X_AXIS, smoothing_type="none"),
        runset_settings=ws.RunsetSettings(filters=ws.And(ws.Metric("Group") == what.sweep)),
    )


def report(what: Contents, entity: str) -> Any:
    """The same panels as a report, with what they show."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    blocks: list[Any] = [wr.P("Every x-axis is C_total in model FLOPs. The runs' own ledgers are the truth of it.")]
    for name, found in panels(what).items():
        runs = wr.Runset(
            name=what.sweep, filters=expr.And(expr.Metric("Group") == what.sweep)
        )  # of the report's own project
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=found)]
    return wr.Report(project=what.project, entity=entity, title=f"Sweep {what.sweep}"[:128], blocks=blocks)


def specs(what: Contents, entity: str) -> dict[str, dict[str, Any]]:
    """Both as W&B stores them."""
    view, page = workspace(what, entity)._to_model(), report(what, entity)._to_model()
    return {
        "workspace": json.loads(view.model_dump_json(by_alias=True, exclude_none=True)),
        "report": json.loads(page.model_dump_json(by_alias=True, exclude_none=True)),
    }


def dashboard(folder: Path, entity: str | None, say: Callable[[str], None] = print) -> int:
    """Save workspace and report in W&B; without a key, write them as JSON into the sweep's folder."""
    from race_sweeps.tracking.sinks import wandb_key_is_set

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError(f'{error.name} is not installed; pip install "race-sweeps[wandb]"') from None
    what = contents(folder)
    entity = entity or what.entity
    if not wandb_key_is_set():
        for name, spec in specs(what, entity or "entity").items():
            path = folder / "dashboard" / f"{name}.json"
            write_atomic(path, json.dumps(spec, indent=1) + "\n")
            say(str(path))
        say("no W&B key: specifications only; run wandb login, or set WANDB_API_KEY, and the same command saves them")
        return 0
    try:
        entity = entity or str(wandb.Api().default_entity)
        for saved in (workspace(what, entity), report(what, entity)):
            saved.save()
            say(saved.url)
    except Exception as error:  # whatever wandb, its transport or the server said
        raise UserError(f"W&B did not save the dashboard: {type(error).__name__}: {str(error)[:300]}") from None
    return 0
