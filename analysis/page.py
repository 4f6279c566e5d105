"""The report page: one HTML file that holds its style, script and figures, and asks nothing of a network."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from analysis import figures
from analysis.compare import Rung, cell_verdict, edge_text, interval_text, verdict_text
from analysis.findings import Findings
from analysis.load import COMPONENTS, Sweep
from analysis.units import NONE, fixed, flops_text, p_text, percent, seconds_text, signed


def _resource(name: str) -> str:
    return files("analysis").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class _Column:
    head: str
    numeric: bool = False
    wide: bool = False


@dataclass(frozen=True)
class _Field:
    """What a table cell shows, and the number it sorts by."""

    text: str
    key: float | None = None


def _table(
    columns: Sequence[_Column], rows: Iterable[Sequence[_Field]], label: str, sortable: bool = False,
    best: Sequence[bool] = (), tall: bool = False,
) -> str:  # fmt: skip
    """An HTML table; every text is escaped here and nowhere else."""
    head = "".join(f'<th scope="col"{" class=n" if c.numeric else ""}>{escape(c.head)}</th>' for c in columns)
    body = []
    for number, row in enumerate(rows):
        cells = []
        for column, item in zip(columns, row, strict=True):
            kind = "n" if column.numeric else "wide" if column.wide else ""
            attributes = f' class="{kind}"' if kind else ""
            if item.key is not None and math.isfinite(item.key):
                attributes += f' data-v="{item.key!r}"'
            elif item.text in (NONE, ""):
                attributes += " data-blank"
            cells.append(f"<td{attributes}>{escape(item.text)}</td>")
        mark = ' class="best"' if number < len(best) and best[number] else ""
        body.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll{" tall" if tall else ""}" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table{' class=sortable' if sortable else ''}><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _number(value: float, text: str) -> _Field:
    return _Field(text, float(value))


def _cells_table(rung: Rung, value: str, simulated: bool) -> str:
    columns = [
        _Column("model"), _Column("allocation"), _Column("achieved rho", True), _Column(f"{value} mean", True),
        _Column("sd", True), _Column("n", True), _Column("verdict", wide=True), _Column("short of best", True),
        _Column("95% interval", True), _Column("corrected p", True), _Column("gain over start", True),
        _Column("planned rho", True), _Column("C / rung − 1", True),
    ]  # fmt: skip
    if simulated:
        columns.append(_Column("data"))
    rows = []
    for cell in rung.cells:
        d = rung.against_best(cell)
        sd = math.nan if cell.sd is None else cell.sd
        row = [
            _Field(cell.model), _Field(cell.allocation), _number(cell.rho, fixed(cell.rho)),
            _number(cell.mean, fixed(cell.mean)), _number(sd, fixed(sd)), _number(cell.n, str(cell.n)),
            _Field(cell_verdict(rung, cell)), _Field(NONE) if d is None else _number(d.value, fixed(d.value)),
            _Field(NONE if d is None else interval_text(d) or NONE),
            _Field(NONE) if d is None or d.p_holm is None else _number(d.p_holm, p_text(d.p_holm)),
            _number(cell.gain, signed(cell.gain)), _number(cell.rho_planned, fixed(cell.rho_planned)),
            _number(cell.c_error, percent(cell.c_error)),
        ]  # fmt: skip
        if simulated:
            row.append(_Field("SIMULATED" if cell.simulated else "measured"))
        rows.append(row)
    best = [rung.against_best(cell) is None for cell in rung.cells]
    return _table(columns, rows, f"Cells at {flops_text(rung.budget)}", sortable=True, best=best)


def _models_table(rung: Rung, value: str, simulated: bool) -> str:
    columns = [
        _Column("model"), _Column("best allocation"), _Column("achieved rho", True), _Column(f"{value}", True),
        _Column("start", True), _Column("gain over start", wide=True), _Column("short of the winner", wide=True),
        _Column("place in the tested range", wide=True),
    ]  # fmt: skip
    if simulated:
        columns.append(_Column("data"))
    rows = []
    for model, cell in rung.best.items():
        gain = next(d for d in rung.gains if d.cell is cell)
        behind = next((d for d in rung.models if d.other is cell), None)
        rows.append([
            _Field(model), _Field(cell.allocation), _number(cell.rho, fixed(cell.rho)),
            _number(cell.mean, fixed(cell.mean)), _number(rung.starts[model], fixed(rung.starts[model])),
            _Field(f"{signed(gain.value)} ({verdict_text(gain)})"),
            _Field("the winner" if behind is None else f"{fixed(behind.value)} ({verdict_text(behind)})"),
            _Field(edge_text(rung.edges[model]) or "inside"),
            *([_Field("SIMULATED" if cell.simulated else "measured")] if simulated else []),
        ])  # fmt: skip
    best = [cell is rung.winner for cell in rung.best.values()]
    return _table(columns, rows, f"Models at {flops_text(rung.budget)}", best=best)


def _runs_table(findings: Findings) -> str:
    simulated = findings.sweep.simulated
    columns = [
        _Column("point"), _Column("model"), _Column("reward"), _Column("allocation"), _Column("seed", True),
        _Column("set"), _Column("rung", True), _Column("budget", True), _Column("C_total", True),
        _Column("C / rung − 1", True), _Column("rho", True), _Column("rho − planned", True), _Column("pass@1", True),
        _Column("its se (problems)", True), _Column("gain", True), _Column("native reward", True),
        _Column("truncated", True), _Column("length", True), _Column("step", True), _Column("train time", True),
    ]  # fmt: skip
    if simulated:
        columns.append(_Column("data"))
    rows = []
    for r in findings.sweep.runs.to_dict("records"):
        row = [
            _Field(r["point"]), _Field(r["model"]), _Field(r["setting"]), _Field(r["allocation"]),
            _number(r["seed"], str(r["seed"])), _Field(r["set"]), _number(r["rung"], str(r["rung"])),
            _number(r["budget"], "start" if r["rung"] == 0 else flops_text(r["budget"])),
            _number(r["c_total"], flops_text(r["c_total"])), _number(r["c_error"], percent(r["c_error"])),
            _number(r["rho"], fixed(r["rho"])), _number(r["rho_error"], signed(r["rho_error"])),
            _number(r["pass@1"], fixed(r["pass@1"])), _number(r["pass@1_se"], fixed(r["pass@1_se"])),
            _number(r["gain"], signed(r["gain"])), _number(r["native_reward"], fixed(r["native_reward"])),
            _number(r["truncated"], fixed(r["truncated"])), _number(r["mean_length"], fixed(r["mean_length"], 1)),
            _number(r["step"], str(r["step"])), _number(r["seconds"], seconds_text(r["seconds"])),
        ]  # fmt: skip
        if simulated:
            row.append(_Field("SIMULATED" if r["simulated"] else "measured"))
        rows.append(row)
    return _table(columns, rows, "Runs", sortable=True, tall=True)


def _compute_table(findings: Findings) -> str:
    """Compute of finished points by model and convention, with the update fraction each convention reports."""
    columns = [
        _Column("model"), _Column("convention"), _Column("search", True), _Column("learning", True),
        _Column("reward", True), _Column("total", True), _Column("rho", True), _Column("evaluation", True),
        _Column("lost to restarts", True), _Column("train time", True),
    ]  # fmt: skip
    results = findings.sweep.results
    models = list(dict.fromkeys(results["model"]))
    groups = [(m, results[results["model"] == m]) for m in models]
    if len(models) > 1:
        groups.append(("all models", results))
    rows = []
    for model, part in groups:
        for name, prefix in (("model", "c"), ("executed", "executed"), ("paper", "paper")):
            flops = {k: float(part[f"{prefix}_{k}"].sum()) for k in (*COMPONENTS, "total")}
            rho = flops["learning"] / flops["total"] if flops["total"] else math.nan
            own = name == "model"  # evaluation and lost work are kept in the model convention
            extra = [float(part[column].sum()) for column in ("eval_flops", "lost_flops")]
            seconds = float(part[[f"seconds_{k}" for k in COMPONENTS]].sum().sum())
            rows.append([
                _Field(model), _Field(name), *(_number(flops[k], flops_text(flops[k])) for k in (*COMPONENTS, "total")),
                _number(rho, fixed(rho)), *(_number(v, flops_text(v)) if own else _Field(NONE) for v in extra),
                _number(seconds, seconds_text(seconds)) if own else _Field(NONE),
            ])  # fmt: skip
    return _table(columns, rows, "Compute of finished points")


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _open_points(findings: Findings) -> str:
    sweep = findings.sweep
    if not sweep.unfinished and not sweep.skipped:
        return "<p>None: every point is finished and readable.</p>"

    def named(point: str) -> str:
        entry = sweep.entries.get(point)
        if entry is None:
            return point
        return f"{point} ({entry.get('model')}, {entry.get('update_fraction')}, seed {entry.get('seed')})"

    columns = [_Column("point"), _Column("state"), _Column("spent of its budget", True), _Column("why", wide=True)]
    rows = [
        [
            _Field(named(u.point)), _Field("unfinished"),
            _Field(NONE) if u.fraction is None else _number(u.fraction, f"{u.fraction:.0%}"), _Field(u.reason),
        ]
        for u in sweep.unfinished
    ]  # fmt: skip
    rows += [[_Field(named(s.point)), _Field("left out"), _Field(NONE), _Field(s.reason)] for s in sweep.skipped]
    return _table(columns, rows, "Unfinished and left out points")


def html_page(findings: Findings) -> str:
    """The report as one self-contained HTML page."""
    sweep = findings.sweep
    badge = ' <span class="badge">SIMULATED</span>' if sweep.simulated else ""
    parts = [f"<h1>Report of sweep {escape(sweep.name)}{badge}</h1>"]
    lead = "".join(f"<p>{escape(s)}</p>" for s in findings.sentences)
    parts.append(f'<div class="lead">{lead}</div>{_list(findings.details)}')
    if sweep.simulated:
        parts.append(
            '<p class="warn">SIMULATED: these numbers come from a simulation, no model was trained for them.</p>'
        )
    parts.append(
        f'<p class="soft">{len(sweep.results)} of {sweep.points} points finished; {len(sweep.unfinished)} unfinished, '
        f"{len(sweep.skipped)} left out. Value: {escape(findings.value)} on {escape(findings.evaluation_set)}.</p>"
    )
    if findings.notes:
        parts.append(f'<div class="warn">{_list(findings.notes)}</div>')
    settings = list(dict.fromkeys(rung.setting for rung in findings.rungs))
    for number, setting in enumerate(settings, 1):
        parts.append(_setting(findings, setting, f"s{number}", len(settings) > 1))
    parts.append("<h2>Runs</h2>")
    parts.append('<p class="soft">One row per run, rung and evaluation set; choose a heading to sort.</p>')
    parts.append(_runs_table(findings))
    parts.append("<h2>Compute of the finished points</h2>")
    parts.append(
        '<p class="soft">The same runs in three conventions. Lost and evaluation compute are not in total.</p>'
    )
    parts.append(_compute_table(findings))
    parts.append("<h2>Unfinished and left out points</h2>")
    parts.append(_open_points(findings))
    parts.append("<h2>How this was computed</h2>")
    parts.append(_resource("method.html"))
    parts.append(_evaluation(findings))
    parts.append(_provenance(sweep))
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = Template(_resource("report.html"))
    title = escape(f"{'SIMULATED: ' if sweep.simulated else ''}{sweep.name}: report")
    return template.substitute(title=title, body="\n".join(parts), script=script, script_hash=f"sha256-{digest}")


def _setting(findings: Findings, setting: str, prefix: str, several: bool) -> str:
    value, simulated = findings.value, findings.sweep.simulated
    rungs = [rung for rung in findings.rungs if rung.setting == setting]
    results = findings.sweep.results[findings.sweep.results["setting"] == setting]
    models = figures.models_of(rungs)
    of = f" · {escape(setting)}" if several else ""
    mark = "SIMULATED · " if simulated else ""
    panels = [
        figures.svg(
            figures.isoflop(rungs, value, simulated, only=i), f"{prefix}i{i}",
            f"{mark}{value} against achieved rho at {flops_text(rung.budget)}; numbers in the tables below",
        )
        for i, rung in enumerate(rungs)
    ]  # fmt: skip
    split = figures.svg(
        figures.compute_split(results, models, simulated), f"{prefix}c", f"{mark}Shares of search, learning and reward"
    )
    performance = figures.svg(
        figures.compute_performance(rungs, value, simulated), f"{prefix}p", f"{mark}{value} against C_total by model"
    )
    bars = "bars: ± one pooled standard deviation of a single run; " if any(r.sd is not None for r in rungs) else ""
    parts = [
        f"<h2>{mark}IsoFLOP curves{of}</h2><figure><div class=panels>{''.join(panels)}</div>"
        f"<figcaption>{escape(value)} against the update fraction reached, one panel per rung. Small points: seeds; "
        f"lines join means; {bars}dotted: before training; ring: the model's best allocation.</figcaption></figure>",
        f"<h2>{mark}Compute split{of}</h2><figure>{split}<figcaption>Means over seeds at the end of each run. Learning "
        "stands first, so it ends at the achieved rho; the tick is the planned one.</figcaption></figure>",
        f"<h2>{mark}Compute and performance{of}</h2><figure>{performance}<figcaption>Each model at the allocation "
        "that was best at that rung (named at the point), so its values are picked as the highest of several; "
        "dotted: before training.</figcaption></figure>",
        f"<h2>{mark}Cells{of}</h2>",
    ]
    for rung in reversed(rungs):
        spread = (
            f"Pooled seed spread {fixed(rung.sd, 4)} ({rung.df} degrees of freedom); {rung.family} tests in the family."
            if rung.sd is not None
            else "One seed per cell: there is no seed spread, and no difference is established."
        )
        parts.append(f"<h3>{escape(flops_text(rung.budget))}</h3><p class=soft>{spread}</p>")
        parts.append(_models_table(rung, value, simulated))
        parts.append(_cells_table(rung, value, simulated))
    return "\n".join(parts)


def _evaluation(findings: Findings) -> str:
    rows = findings.sweep.runs[findings.sweep.runs["set"] == findings.evaluation_set]

    def kinds(column: str) -> str:
        return ", ".join(f"{v:g}" for v in sorted(set(rows[column].dropna()))) or "not recorded"

    return (
        f"<p>Evaluation on {escape(findings.evaluation_set)}: {kinds('problems')} problems, {kinds('samples')} "
        f"sample(s) each, temperature {kinds('temperature')}.</p>"
    )


def _provenance(sweep: Sweep) -> str:
    manifest = sweep.manifest
    git, versions = ({} if not isinstance(v, dict) else v for v in map(manifest.get, ("git", "versions")))
    command = manifest.get("command")
    revision = str(git.get("revision") or "not recorded") + (" (with uncommitted changes)" if git.get("dirty") else "")
    facts = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else "not recorded",
        "created": str(manifest.get("created") or "not recorded"),
        "git revision": revision,
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) or "not recorded",
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()) + "</dl>"
