"""The allocation-aware compute report that a paper or model card should carry: JSON, Markdown or LaTeX.

Sums come from the ledgers, as exact integers. Runs that never finished are counted too: their compute was spent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.load import find_sweep, object_of, point_ids
from race_sweeps import ledger
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder

READINGS = ("model", "executed", "paper")
COMPONENTS = ("search", "learning", "reward")
SHARES = {"rho": "learning", "sigma": "search", "phi": "reward"}
FORMATS = ("json", "md", "latex")
AXES = ("model", "reward", "update_fraction", "seed")


@dataclass(frozen=True)
class Statement:
    """Compute of a run or sweep. `total` and each of `runs` hold `flops` (reading -> component -> integer), `shares`,
    `tokens` and `seconds`; `left_out` the points that could not be read, with the reason."""

    name: str
    simulated: bool
    provenance: dict[str, Any]
    total: dict[str, Any]
    runs: list[dict[str, Any]]
    left_out: list[dict[str, str]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"v": 1, **vars(self)}


def state(target: str, root: Path = Path("runs")) -> Statement:
    """The statement of a run's folder, or of a sweep (folder, or name under `root`). Raises `UserError`."""
    given = Path(target)
    if (given / "ledger.jsonl").is_file():
        folders, sweep, name = [RunFolder(given)], given.resolve().parent.parent, given.resolve().name
    else:
        sweep = find_sweep(target, root)
        folders = [RunFolder(sweep / "points" / point) for point in point_ids(sweep)]
        name = sweep.resolve().name
    try:
        manifest = object_of(sweep / "sweep.json")
    except (UserError, OSError):
        manifest = {}
    runs: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    notes: list[str] = []
    for run in folders:
        try:
            if run.ledger.is_file():
                runs.append(_run(run, manifest, notes))
            else:
                left_out.append({"point": run.point_id, "reason": "no ledger: not started"})
        except (UserError, OSError, UnicodeDecodeError) as error:
            left_out.append({"point": run.point_id, "reason": " ".join(str(error).replace(f"{sweep}/", "").split())})
    if not runs:
        reason = f"; {left_out[0]['point']}: {left_out[0]['reason']}" if left_out else ""
        raise UserError(f"{target}: no run has a readable ledger, so there is no compute to state{reason}")
    return Statement(
        name=name,
        simulated=bool(manifest.get("simulated")) or any(run["simulated"] for run in runs),
        provenance={key: manifest.get(key) for key in ("command", "created", "git", "versions")},
        total=_sum(runs),
        runs=runs,
        left_out=left_out,
        notes=notes,
    )


def _run(run: RunFolder, manifest: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    book = ledger.read(run.ledger)
    done = run.result.is_file()
    points = manifest.get("points", [])
    entry = next((p for p in points if isinstance(p, dict) and p.get("id") == run.point_id), {})
    facts = object_of(run.result) if done else entry
    flops = {reading: _components(book, reading) for reading in READINGS}
    if done and facts.get("flops", {}).get("total") != flops["model"]["total"]:
        notes.append(f"{run.point_id}: result.json and the ledger disagree about C_total; the ledger's is used")
    tokens = dict.fromkeys(("prompt", "completion", "cached", "trained", "eval"), 0)
    for row in book.rows:
        if row.phase == "eval":
            tokens["eval"] += row.tokens.prompt + row.tokens.completion
        elif row.phase == "search":
            for name in ("prompt", "completion", "cached"):
                tokens[name] += getattr(row.tokens, name)
        elif row.phase == "learning":
            tokens["trained"] += row.tokens.trained
    seconds = {**book.totals.seconds, "lost": sum(row.seconds for row in book.lost)}
    return {
        "point": run.point_id,
        **{axis: facts.get(axis) for axis in AXES},
        "status": "done" if done else "unfinished",
        "simulated": bool(facts.get("simulated") or manifest.get("simulated")),
        "attempts": book.attempts,
        "flops": flops,
        "shares": {reading: shares(flops[reading]) for reading in READINGS},
        "tokens": tokens,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
    }


def _components(book: ledger.Ledger, reading: str) -> dict[str, int]:
    """The three components and their sum; evaluation and superseded work stand beside it, not in it."""
    flops = dict.fromkeys(ledger.PHASES, 0)
    for row in book.rows:
        flops[row.phase] += getattr(row.flops, reading)
    lost = dict.fromkeys((True, False), 0)
    for row in book.lost:
        lost[row.phase != "eval"] += getattr(row.flops, reading)
    parts = {name: flops[name] for name in COMPONENTS}
    return {**parts, "total": sum(parts.values()), "eval": flops["eval"], "lost": lost[True], "lost_eval": lost[False]}


def shares(flops: dict[str, int]) -> dict[str, float | None]:
    """rho, sigma and phi; None where nothing was spent."""
    total = flops["total"]
    return {name: flops[part] / total if total else None for name, part in SHARES.items()}


def _sum(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    flops = {r: {k: sum(run["flops"][r][k] for run in runs) for k in runs[0]["flops"][r]} for r in READINGS}
    return {
        "runs": len(runs),
        "unfinished": sum(run["status"] != "done" for run in runs),
        "attempts": sum(run["attempts"] for run in runs),
        "flops": flops,
        "shares": {reading: shares(flops[reading]) for reading in READINGS},
        "tokens": {k: sum(run["tokens"][k] for run in runs) for k in runs[0]["tokens"]},
        "seconds": {k: round(sum(run["seconds"][k] for run in runs), 4) for k in runs[0]["seconds"]},
    }


# --- text ---------------------------------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def latex(text: str) -> str:
    """`text` as LaTeX prints it literally; control characters become spaces."""
    return "".join(_LATEX.get(c, c if c.isprintable() else " ") for c in text)


def markdown(text: str) -> str:
    """`text` as Markdown shows it literally, also inside a table."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", clean)


def _power(value: int) -> tuple[str, int]:
    mantissa, exponent = f"{value:.3e}".split("e")
    return mantissa, int(exponent)


def _md_flops(value: int) -> str:
    return f"{value:.3e}" if value else "0"


def _latex_flops(value: int) -> str:
    return "$0$" if not value else "${} \\times 10^{{{}}}$".format(*_power(value))


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


LINES = {
    "search": "C_search", "learning": "C_learning", "reward": "C_reward", "total": "C_total",
    "eval": "evaluation (outside C_total)", "lost": "lost to restarts (outside C_total)",
}  # fmt: skip


def rows(entry: dict[str, Any], number: Callable[[int], str]) -> Iterator[list[str]]:
    """The readings side by side: components and totals, then shares."""
    for key, name in LINES.items():
        yield [name, *(number(entry["flops"][reading][key]) for reading in READINGS)]
    for share, part in SHARES.items():
        yield [f"{share} ({part})", *(_share(entry["shares"][reading][share]) for reading in READINGS)]


def facts(statement: Statement) -> Iterator[tuple[str, str]]:
    """What stands below the table."""
    total, source = statement.total, statement.provenance
    count, open_runs = total["runs"], total["unfinished"]
    yield "runs", f"{count}" + (f", of which {open_runs} unfinished and counted" if open_runs else "")
    if statement.left_out:
        yield "left out", f"{len(statement.left_out)} point(s) without a readable ledger"
    yield "tokens", ", ".join(f"{name} {value:,}" for name, value in total["tokens"].items())
    yield "hardware seconds", ", ".join(f"{name} {value:,.1f}" for name, value in total["seconds"].items())
    versions = source.get("versions")
    listed = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""
    yield "versions", listed or "not recorded"
    git = source.get("git")
    revision = git.get("revision") if isinstance(git, dict) else None
    changed = " with uncommitted changes" if revision and isinstance(git, dict) and git.get("dirty") else ""
    yield "code", f"{revision or 'not recorded'}{changed}"


HEAD = ("FLOPs", "model", "executed", "paper")
CAPTION = (
    "Model FLOPs count what the mathematics needs (real tokens, causal attention), executed FLOPs what the program "
    "runs (padding, recomputation), paper FLOPs the parameter-token estimate."
)


def render(statement: Statement, form: str, each: bool = False) -> str:
    """The statement as text: `json`, `md` or `latex`; `each` adds one line a run. Raises `UserError`."""
    if form == "json":
        return json.dumps(statement.to_json(), indent=1, allow_nan=False) + "\n"
    mark = "SIMULATED: " if statement.simulated else ""
    title = f"{mark}Compute statement of {statement.name}"
    runs = [
        [*(str(run[k]) for k in ("point", *AXES)), run["flops"]["model"]["total"], run["shares"]["model"]["rho"]]
        for run in statement.runs
    ]
    run_head = ["run", *AXES, "C_total", "rho"]
    if form == "md":
        out = [f"### {markdown(title)}", "", *_md_table(HEAD, rows(statement.total, _md_flops)), "", CAPTION, ""]
        out += [f"- {markdown(key)}: {markdown(value)}" for key, value in facts(statement)]
        if each:
            lines = ([*map(markdown, run[:5]), _md_flops(run[5]), _share(run[6])] for run in runs)
            out += ["", *_md_table([markdown(name) for name in run_head], lines)]
        out += [f"- note: {markdown(note)}" for note in statement.notes]
        return "\n".join(out) + "\n"
    if form == "latex":
        body = ([latex(row[0]), *row[1:]] for row in rows(statement.total, _latex_flops))
        out = [
            r"\begin{table}", r"\centering", *latex_table([latex(name) for name in HEAD], body),
            rf"\caption{{{latex(title)}. {latex(CAPTION)} "
            rf"{' '.join(f'{latex(key.capitalize())}: {latex(value)}.' for key, value in facts(statement))}}}",
            r"\end{table}",
        ]  # fmt: skip
        if each:
            lines = ([*map(latex, run[:5]), _latex_flops(run[5]), _share(run[6])] for run in runs)
            out += [r"\begin{table}", r"\centering", *latex_table([latex(n) for n in run_head], lines), r"\end{table}"]
        return "\n".join(out) + "\n"
    raise UserError(f"--format {form}: valid: {', '.join(FORMATS)}")


def _md_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---", *("--:" for _ in head[1:])], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def latex_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    r"""A `tabular` with nothing but LaTeX's own commands; cells are LaTeX already."""
    lines = [" & ".join(line) + r" \\" for line in body]
    columns = "l" + "r" * (len(head) - 1)
    return [rf"\begin{{tabular}}{{{columns}}}", r"\hline", " & ".join(head) + r" \\", r"\hline", *lines, r"\hline",
            r"\end{tabular}"]  # fmt: skip
