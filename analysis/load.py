"""Read a sweep's folder into tables. Damaged and unfinished points are reported, never fatal, never guessed at."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from race_sweeps.errors import UserError, choices
from race_sweeps.folder import RunFolder, read_rows

COMPONENTS = ("search", "learning", "reward")
_KEY_COLUMNS = ("point", "model", "reward", "update_fraction", "allocation", "setting", "seed", "simulated")
_VALUE_COLUMNS = (
    "rung", "budget", "set", "step", "c_search", "c_learning", "c_reward", "c_total", "c_error", "rho_planned", "rho",
    "rho_error", "pass@1", "pass@1_se", "native_reward", "gain", "truncated", "mean_length", "problems", "samples",
    "temperature", "seconds", "last",
)  # fmt: skip
_RESULT_COLUMNS = (
    *(f"executed_{part}" for part in (*COMPONENTS, "total")),
    *(f"paper_{part}" for part in (*COMPONENTS, "total")),
    "lost_flops", "eval_flops",
    *(f"seconds_{part}" for part in (*COMPONENTS, "eval")),
)  # fmt: skip
RUN_COLUMNS = (*_KEY_COLUMNS, *_VALUE_COLUMNS, *_RESULT_COLUMNS)
RESULT_COLUMNS = (*_KEY_COLUMNS, "budget", "rho_planned", "rho", *(f"c_{part}" for part in (*COMPONENTS, "total")),
                  *_RESULT_COLUMNS)  # fmt: skip

# Overrides under these keys are axes with a column of their own, or change nothing that is compared.
_AXES = ("model", "reward", "update_fraction", "seed", "budget", "sweep", "runs_dir", "plan")
_OWN_COLUMN = ("update_fraction.rho", "update_fraction.budget_factor")


class Skipped(NamedTuple):
    """A point whose files are damaged. `reason` is one line."""

    point: str
    reason: str


class Unfinished(NamedTuple):
    """A point without `result.json`. `fraction` of its budget that is spent; None where the files do not tell."""

    point: str
    fraction: float | None
    reason: str


@dataclass(frozen=True, eq=False)
class Sweep:
    """A sweep as read from its folder.

    `runs`: one row per (finished point, rung, evaluation set), columns `RUN_COLUMNS`; rung 0 is the state before
    training, with budget 0. FLOPs are model FLOPs as float64 (exact integers stay in the files: they outgrow 64 bits).
    `c_error` = c_total / budget - 1; `rho_error` = achieved - planned; `gain` = pass@1 over rung 0 of the same point
    and set. The whole run's executed, paper, lost and evaluation FLOPs and its seconds stand at its last planned rung
    (`last`), NaN elsewhere. `results`: one row per finished point, columns `RESULT_COLUMNS`.
    `allocation` is the update fraction's name, made unique by its planned rho where one name covers several;
    `setting` names what else tells comparable groups apart: the reward, and other overrides that vary in the sweep.
    `entries`: the manifest's points by id. `notes`: one line for each thing a reader of the tables must know.
    """

    name: str
    folder: Path
    manifest: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    runs: pd.DataFrame
    results: pd.DataFrame
    skipped: list[Skipped]
    unfinished: list[Unfinished]
    notes: list[str]

    @property
    def simulated(self) -> bool:
        """Whether the manifest or any finished point says that its numbers were not measured."""
        return bool(self.manifest.get("simulated", False)) or bool(self.results["simulated"].any())

    @property
    def points(self) -> int:
        """Points known: finished, unfinished and damaged."""
        return len(self.results) + len(self.unfinished) + len(self.skipped)


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").is_file() or (folder / "points").is_dir()


def find_sweep(text: str, root: Path = Path("runs")) -> Path:
    """The sweep's folder, for a path or a name under `root`. Raises `UserError` that lists the sweeps found nearby."""
    given = Path(text)
    for folder in (given, root / text):
        if text and is_sweep(folder):
            return folder
    places = [given, given.parent, root] if given.is_dir() else [given.parent, root]
    for place in dict.fromkeys(p for p in places if p.is_dir()):
        found = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and is_sweep(entry))
        if found:
            raise UserError(f"{text!r} is not a sweep; sweeps in {place}/: {choices(given.name, found)}")
    raise UserError(f"{text!r} is not a sweep, and there is none in {root}/; give the path of a folder with sweep.json")


def load_sweep(folder: Path) -> Sweep:
    """Read every point of the sweep in `folder`. Raises `UserError` when there is no sweep or it has no points."""
    folder = find_sweep(str(folder))
    notes: list[str] = []
    manifest = _manifest(folder, notes)
    entries = _entries(manifest, notes)
    there = _there(folder)
    ids = list(dict.fromkeys([*entries, *there]))
    if not ids:
        raise UserError(f"{folder} has no points yet; start the sweep first, or give another one")
    if entries and (extra := [i for i in there if i not in entries]):
        notes.append(f"{len(extra)} point folder(s) are not in sweep.json and are included: {', '.join(extra)}")

    finished: list[_Point] = []
    skipped: list[Skipped] = []
    unfinished: list[Unfinished] = []
    for point in ids:
        run = RunFolder(folder / "points" / point)
        try:
            if run.result.exists():
                finished.append(_read_point(run, entries.get(point, {}), notes))
            else:
                unfinished.append(_progress(run))
        except (UserError, OSError, UnicodeDecodeError) as error:
            skipped.append(Skipped(point, _short(str(error), folder)))
    for other in [p for p in finished if p.key["unfinished"]]:
        unfinished.append(Unfinished(other.key["point"], None, other.key["unfinished"]))
        finished.remove(other)
    _label(finished, entries)
    notes.extend(_coverage(finished, entries, unfinished, skipped))
    runs = pd.DataFrame([{**p.key, **row} for p in finished for row in p.rows], columns=list(RUN_COLUMNS))
    results = pd.DataFrame([{**p.key, **p.totals} for p in finished], columns=list(RESULT_COLUMNS))
    name = manifest.get("sweep")
    return Sweep(
        name=name if isinstance(name, str) and name else folder.resolve().name,
        folder=folder,
        manifest=manifest,
        entries=entries,
        runs=runs,
        results=results,
        skipped=skipped,
        unfinished=unfinished,
        notes=notes,
    )


def _there(folder: Path) -> list[str]:
    points = folder / "points"
    return sorted(p.name for p in points.iterdir() if p.is_dir()) if points.is_dir() else []


def point_ids(folder: Path) -> list[str]:
    """Ids of a sweep's points: those of its manifest, then folders that it does not name."""
    return list(dict.fromkeys([*_entries(_manifest(folder, []), []), *_there(folder)]))


@dataclass
class _Point:
    key: dict[str, Any]
    rows: list[dict[str, Any]]
    totals: dict[str, Any]


def _short(message: str, folder: Path) -> str:
    return " ".join(message.replace(f"{folder}/", "").split())


def object_of(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError` where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged (not a JSON object)")
    return value


def _manifest(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return object_of(folder / "sweep.json")
    except (UserError, OSError) as error:
        notes.append(f"{_short(str(error), folder)}: the command and the planned points are not known")
        return {}


def _entries(manifest: Mapping[str, Any], notes: list[str]) -> dict[str, dict[str, Any]]:
    """Manifest entries by point id, in the sweep's order."""
    entries: dict[str, dict[str, Any]] = {}
    points = manifest.get("points", [])
    for entry in points if isinstance(points, list) else []:
        point = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(point, str) or not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._-]*", point):
            notes.append("sweep.json has an entry without a usable point id; it is left out")
        else:
            entries[point] = entry
    return entries


def _number(row: Mapping[str, Any], key: str, where: str) -> Any:
    """A finite number at `key`, as it stands in the file (integers stay exact)."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key} is {value!r}, not a number")
    return value


def _optional(row: Mapping[str, Any], key: str, where: str) -> float:
    return math.nan if row.get(key) is None else float(_number(row, key, where))


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: {key} is {value!r}, not a name")
    return value


def _part(row: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = row.get(key)
    if not isinstance(value, dict):
        raise UserError(f"{where}: {key} is missing")
    return value


def _components(row: Mapping[str, Any], key: str, where: str) -> dict[str, int]:
    """Search, learning, reward and total FLOPs; the total must be their sum."""
    part = _part(row, key, where)
    flops = {name: _number(part, name, f"{where}: {key}") for name in (*COMPONENTS, "total")}
    if flops["total"] != sum(flops[name] for name in COMPONENTS):
        raise UserError(f"{where}: {key}.total is not search + learning + reward")
    return flops


def _read_point(run: RunFolder, entry: Mapping[str, Any], notes: list[str]) -> _Point:
    point, where = run.point_id, f"{run.result}"
    result = object_of(run.result)
    # A folder copied under another name would count one run as two seeds.
    if result.get("point") != point:
        raise UserError(f"{where}: belongs to point {result.get('point')!r}")
    status = result.get("status")
    key: dict[str, Any] = {
        "point": point,
        **{name: _text(result, name, where) for name in ("model", "reward", "update_fraction")},
        "seed": _number(result, "seed", where),
        "simulated": bool(result.get("simulated", False)),
        "overrides": _overrides(entry),
        "unfinished": "" if status == "done" else f"status is {status!r}",
    }
    planned = _part(result, "planned", where)
    rho_planned = _number(planned, "rho", f"{where}: planned")
    budget = _number(planned, "flops", f"{where}: planned")
    flops = _components(result, "flops", where)
    seconds = result.get("seconds") if isinstance(result.get("seconds"), dict) else {}
    assert isinstance(seconds, dict)
    whole = {
        **{f"executed_{k}": float(v) for k, v in _components(result, "executed_flops", where).items()},
        **{f"paper_{k}": float(v) for k, v in _components(result, "paper_flops", where).items()},
        "lost_flops": float(_number(result["flops"], "lost", f"{where}: flops")),
        "eval_flops": float(_number(result["flops"], "eval", f"{where}: flops")),
        **{f"seconds_{k}": _optional(seconds, k, f"{where}: seconds") for k in (*COMPONENTS, "eval")},
    }
    totals = {
        "budget": float(budget),
        "rho_planned": rho_planned,
        "rho": float(_number(result, "rho", where)),
        **{f"c_{k}": float(v) for k, v in flops.items()},
        **whole,
    }
    rows = _eval_rows(run, notes)
    rungs = _planned_rungs(run, notes)
    if rungs is not None:
        seen = {row["budget"] for row in rows}
        notes.extend(
            f"point {point} ({key['model']}, {key['update_fraction']}, seed {key['seed']}) has no evaluation at "
            f"rung {number}"
            for number, rung in enumerate(rungs, 1)
            if rung not in seen
        )
    starts = {row["set"]: row["pass@1"] for row in rows if row["rung"] == 0}
    for row in rows:
        row["rho_planned"] = rho_planned
        row["rho_error"] = row["rho"] - rho_planned
        row["c_error"] = row["c_total"] / row["budget"] - 1 if row["budget"] else math.nan
        row["gain"] = row["pass@1"] - starts.get(row["set"], math.nan)
        row["last"] = row["budget"] == budget
        row.update(whole if row["last"] else {})
        row["budget"] = float(row["budget"])
    return _Point(key, rows, totals)


def _eval_rows(run: RunFolder, notes: list[str]) -> list[dict[str, Any]]:
    """Rows of `evals.jsonl` as table rows. A rung evaluated again after a restart counts once: its newest row."""
    if not run.evals.is_file():
        raise UserError(f"{run.evals} is missing")
    torn: list[str] = []
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for number, row in enumerate(read_rows(run.evals, torn.append), 1):
        where = f"{run.evals}: line {number}"
        rung, name = _number(row, "rung", where), _text(row, "set", where)
        budget = _number(row, "budget", where)
        if (rung == 0) != (budget == 0) or rung < 0 or budget < 0:
            raise UserError(f"{where}: rung {rung} with budget {budget}")
        flops = _components(row, "flops", where)
        rows[rung, name] = {
            "rung": rung,
            "budget": budget,
            "set": name,
            "step": _number(row, "step", where),
            **{f"c_{k}": float(v) for k, v in flops.items()},
            "rho": math.nan if rung == 0 else float(_number(row, "rho", where)),
            "pass@1": float(_number(row, "pass@1", where)),
            **{k: _optional(row, k, where) for k in (
                "pass@1_se", "native_reward", "truncated", "mean_length", "problems", "samples", "temperature",
                "seconds",
            )},
        }  # fmt: skip
    notes.extend(f"point {run.point_id}: evals.jsonl ends in a torn line, which is left out" for _ in torn)
    if not any(rung for rung, _ in rows):
        raise UserError(f"{run.evals} has no evaluation after training")
    return [rows[key] for key in sorted(rows)]


def _planned_rungs(run: RunFolder, notes: list[str]) -> list[int] | None:
    try:
        plan = object_of(run.plan)
        rungs = plan.get("rungs")
        if not isinstance(rungs, list) or not rungs:
            raise UserError(f"{run.plan} has no rungs")
        return rungs
    except (UserError, OSError) as error:
        notes.append(f"point {run.point_id}: {_short(str(error), run.path)}, so missing rungs cannot be told")
        return None


def _progress(run: RunFolder) -> Unfinished:
    if not run.path.is_dir() or not (run.metrics.exists() or run.ledger.exists() or run.evals.exists()):
        return Unfinished(run.point_id, 0.0, "not started")
    last: dict[str, Any] = {}
    for row in read_rows(run.metrics):
        last = row
    if not last:
        return Unfinished(run.point_id, 0.0, "begun, no optimizer step yet")
    budget = _number(object_of(run.plan), "budget", f"{run.plan}")
    spent = _number(last, "flops_total", f"{run.metrics}: last line")
    if budget <= 0:
        raise UserError(f"{run.plan}: budget is {budget!r}")
    return Unfinished(run.point_id, spent / budget, f"stopped or running at step {last.get('step')}")


def _overrides(entry: Mapping[str, Any]) -> dict[str, str]:
    overrides = entry.get("overrides", [])
    items = [item for item in overrides if isinstance(item, str)] if isinstance(overrides, list) else []
    return {key: value for key, _, value in (item.lstrip("+").partition("=") for item in items)}


def _label(finished: list[_Point], entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill `allocation` and `setting`."""
    choices_of: dict[str, set[str]] = defaultdict(set)
    tables = [_overrides(entry) for entry in entries.values()]
    for name in {key for table in tables for key in table}:
        choices_of[name] = {table.get(name, "") for table in tables}
    varied = sorted(
        name
        for name, values in choices_of.items()
        if len(values) > 1 and name not in _OWN_COLUMN and name not in _AXES
        and name.split(".")[0] not in ("budget", "plan")
    )  # fmt: skip
    rhos: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for point in finished:
        key = point.key
        key["setting"] = ", ".join(
            [key["reward"], *(f"{name}={key['overrides'][name]}" for name in varied if name in key["overrides"])]
        )
        where = (key["update_fraction"], key["model"], key["setting"], str(point.totals["budget"]))
        rhos[where].add(f"{point.totals['rho_planned']:.2f}")
    several = {where[0] for where, values in rhos.items() if len(values) > 1}
    for point in finished:
        name = point.key["update_fraction"]
        point.key["allocation"] = f"{name} at {point.totals['rho_planned']:.2f}" if name in several else name


def _coverage(
    finished: Iterable[_Point],
    entries: Mapping[str, Mapping[str, Any]],
    unfinished: Iterable[Unfinished],
    skipped: Iterable[Skipped],
) -> list[str]:
    """Cells of the grid that have no finished run: the tested range is narrower than the planned one."""
    done = {(p.key["model"], p.key["update_fraction"]) for p in finished}
    pending = [*(u.point for u in unfinished), *(s.point for s in skipped)]
    open_points = [entries[point] for point in pending if point in entries]
    cells = dict.fromkeys((str(e.get("model")), str(e.get("update_fraction"))) for e in open_points)
    absent = [f"{model} {fraction}" for model, fraction in cells if (model, fraction) not in done]
    return [f"no finished run yet for: {', '.join(absent)}"] if absent and done else []
