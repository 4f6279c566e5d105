"""`python -m analysis`: a sweep's report and tables. `--help` loads neither pandas nor matplotlib."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from race_sweeps.errors import UserError, exit_status, refuse_unknown_command

if TYPE_CHECKING:
    from analysis.findings import Findings

COMMANDS = ("report", "table", "statement", "isoflop", "sync", "dashboard")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m analysis", description="Read a sweep's folder: tables, figures and one report page."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    report = commands.add_parser("report", help="write runs.csv, runs.parquet, summary.json, figures and report.html")
    report.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: <sweep folder>/report)")
    table = commands.add_parser("table", help="print the cells of every rung and what can be said about them")
    table.add_argument("--json", action="store_true", help="print the report's summary as JSON instead")
    sync = commands.add_parser("sync", help="upload the finished runs to W&B, tracked or not, each whole and once")
    board = commands.add_parser("dashboard", help="save a W&B workspace and report, or write them as JSON when offline")
    board.add_argument("--entity", metavar="NAME", help="W&B user or team (default: tracking.entity, or the key's own)")
    told = commands.add_parser("statement", help="print the compute statement of a run or sweep, for a paper or card")
    told.add_argument(
        "target", metavar="RUN_OR_SWEEP", help="a run's folder, a sweep's folder, or its name under runs/"
    )
    told.add_argument("--format", default="md", help="md (default), latex, or json with exact integers and every run")
    told.add_argument("--runs", action="store_true", help="a line for every run, in md and latex too")
    fit = commands.add_parser("isoflop", help="fit any IsoFLOP table (CSV): an optimum per budget, laws across budgets")
    fit.add_argument("file", metavar="FILE.csv", type=Path)
    fit.add_argument("--budget", metavar="COL", required=True, help="compute of a row")
    fit.add_argument("--x", metavar="COL", required=True, help="what is to be chosen: parameters, a share, ...")
    fit.add_argument("--value", metavar="COL", required=True, help="what it reached")
    fit.add_argument("--group", metavar="COL", help="fit every value of this column by itself")
    fit.add_argument("--minimize", action="store_true", help="the value is a loss")
    fit.add_argument(
        "--scale", choices=("auto", "log", "logit"), default="auto", help="auto: logit for shares in (0,1)"
    )
    fit.add_argument("--tolerance", metavar="SHARE", type=float, help="budgets this near are one (default: found)")
    fit.add_argument("--keep-outliers", action="store_true", help="fit flagged rows too")
    fit.add_argument("--json", action="store_true")
    for command in (sync, board):
        command.add_argument("sweep", metavar="SWEEP", help="a sweep's folder, or its name under runs/")
    for command in (report, table):
        command.add_argument("sweep", metavar="SWEEP", help="a sweep's folder, or its name under runs/")
        command.add_argument("--set", metavar="NAME", help="evaluation set (default: heldout, or the first there is)")
        command.add_argument("--value", metavar="NAME", default="pass@1", help="pass@1 (default) or native_reward")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 after a user's mistake (one line on stderr)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_status("analysis", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    parser = _parser()
    refuse_unknown_command(arguments, COMMANDS)
    options = parser.parse_args(arguments)
    if options.command is None:
        raise UserError(f"give a command: {', '.join(COMMANDS)}; see python -m analysis --help")
    if options.command == "isoflop":
        from analysis.isoflop_table import run

        return run(options)
    if options.command == "statement":
        from analysis.statement import render, state

        print(render(state(options.target), options.format, options.runs), end="")
        return 0
    from analysis.load import find_sweep, load_sweep

    folder = find_sweep(options.sweep)
    if options.command == "sync":
        from analysis.sync import sync

        return sync(folder)
    if options.command == "dashboard":
        from analysis.dashboard import dashboard

        return dashboard(folder, options.entity)
    from analysis.findings import find

    findings = find(load_sweep(folder), options.value, options.set)
    if options.command == "report":
        from analysis.report import write_report
        from analysis.units import printable

        page = write_report(findings, options.out if options.out is not None else folder / "report")
        print(page)
        for line in findings.sentences:
            print(printable(line))
    elif options.json:
        import json

        from analysis.findings import summary

        print(json.dumps(summary(findings), indent=1, allow_nan=False))
    else:
        _print_table(findings)
    return 0


def _print_table(findings: Findings) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from analysis.compare import EXCEEDS, NO_SPREAD, ONE_SEED, WITHIN, edge_text
    from analysis.units import fixed, flops_text, percent, printable, signed

    shorts = {EXCEEDS: "exceeds", WITHIN: "within", ONE_SEED: "one seed", NO_SPREAD: "no spread"}

    def text(value: str) -> Text:  # never markup: names come from files
        return Text(printable(value))

    console = Console()
    simulated = findings.sweep.simulated
    several = len({rung.setting for rung in findings.rungs}) > 1
    for rung in findings.rungs:
        title = f"{'SIMULATED · ' if simulated else ''}{flops_text(rung.budget)}"
        table = Table(
            title=text(f"{title} · {rung.setting}" if several else title), title_justify="left",
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for head in ("model", "allocation"):
            table.add_column(head, overflow="fold")
        for head in ("rho", findings.value, "sd", "n", "gain", "C err", "to best"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("verdict", overflow="fold")
        if simulated:
            table.add_column("data", no_wrap=True)
        for cell in rung.cells:
            d = rung.against_best(cell)
            edge = rung.edges[cell.model]
            verdict = f"best{f' ({edge})' if edge else ''}" if d is None else shorts[d.verdict]
            row = [
                cell.model, cell.allocation, fixed(cell.rho), fixed(cell.mean), fixed(cell.sd), str(cell.n),
                signed(cell.gain), percent(cell.c_error), "" if d is None else fixed(d.value), verdict,
            ]  # fmt: skip
            if simulated:
                row.append("SIM" if cell.simulated else "meas.")
            table.add_row(*map(text, row), style="bold" if d is None else None)
        console.print(table)
    used = {d.verdict for rung in findings.rungs for d in rung.allocations}
    lines = [f"{short} = {long}" for long, short in shorts.items() if long in used]
    edges = dict.fromkeys(edge for rung in findings.rungs for edge in rung.edges.values() if edge)
    lines += [f"best ({edge}) = {edge_text(edge)}" for edge in edges]
    lines += [*findings.sentences, *findings.details, *(f"note: {note}" for note in findings.notes)]
    lines += [f"unfinished: {point}: {reason}" for point, _, reason in findings.sweep.unfinished]
    lines += [f"left out: {point}: {reason}" for point, reason in findings.sweep.skipped]
    for line in lines:
        console.print(text(line))
