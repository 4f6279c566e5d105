"""How each point of a sweep stands: what SLURM says of its job, joined with what lies in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launchers import Progress, attempts, cluster, jobs
from launchers.attempts import Attempt
from launchers.cluster import Job
from launchers.jobs import Array
from race_sweeps import manifest
from race_sweeps.folder import RunFolder
from race_sweeps.progress import progress

Standing = Literal["done", "running", "queued", "pending", "failed", "stopped", "cancelled", "lost", "incomplete"]

STANDINGS: dict[Standing, str] = {
    "done": "has its result",
    "running": "",
    "queued": "waits in the queue",
    "pending": "has never been started",
    "failed": "ended with an error",
    "stopped": "was asked to end, saved its work and did so",
    "cancelled": "was cancelled",
    "lost": "was submitted or started, and nothing is known of its end",
    "incomplete": "its job is COMPLETED, but there is no result",
}

OPEN: tuple[Standing, ...] = ("queued", "running")
"""Standings that lead on by themselves."""


@dataclass(frozen=True)
class PointState:
    """One point. `job`: as SLURM names it, empty if it never had one; `slurm`: its state there, empty if unknown;
    `restarts`: how often SLURM has started it again; `array`: its newest submission."""

    id: str
    state: Standing
    reason: str
    progress: Progress
    job: str = ""
    slurm: str = ""
    restarts: int = 0
    label: dict[str, str] = field(default_factory=dict)
    array: Array | None = None


def look(sweep: Path, only: Sequence[str] | None = None) -> list[PointState]:
    """The points of the sweep in `sweep`, or those with the ids `only`: one squeue, and one sacct if that left some."""
    labels = {row["id"]: _label(row) for row in manifest.read(sweep).get("points", [])}
    ids = list(labels) if only is None else list(only)
    folders = {identity: RunFolder(sweep / "points" / identity) for identity in ids}
    newest = {point: array for array in jobs.load(sweep) for point in array.points if point in folders}
    unfinished = {point: array for point, array in newest.items() if not folders[point].done}
    known = _ask(unfinished.values(), unfinished)
    return [_join(folders[identity], labels.get(identity, {}), newest.get(identity), known) for identity in ids]


def _ask(arrays: Iterable[Array], unfinished: dict[str, Array]) -> dict[str, Job]:
    """What SLURM knows of the jobs of unfinished points."""
    found = cluster.queue(array.job for array in arrays if array.job)
    elements = (array.elements().get(point) for point, array in unfinished.items())
    gone = {element.partition("_")[0] for element in elements if element and element not in found}
    return cluster.accounts(gone) | found


def _join(folder: RunFolder, label: dict[str, str], array: Array | None, known: dict[str, Job]) -> PointState:
    attempt = attempts.newest(folder.path)
    element = array.elements().get(folder.point_id, "") if array else ""
    job = known.get(element)
    state: Standing
    if folder.done:
        state, reason = "done", ""
    elif array is None:
        state, reason = _here(attempt)
    elif job is not None:
        state, reason = _in_slurm(job, attempt if attempt and attempt.job == element else None)
    else:
        state, reason = _forgotten(array, attempt if attempt and attempt.job == element else None)
    restarts = attempt.restarts if attempt and attempt.job == element else 0
    return PointState(
        folder.point_id, state, reason, progress(folder.path, _budget(folder)), element, job.state if job else "",
        restarts, label, array,
    )  # fmt: skip


def _here(attempt: Attempt | None) -> tuple[Standing, str]:
    """A point that no queue has had."""
    if attempt is None:
        return "pending", ""
    if attempt.state is not None:
        return _ended(attempt)
    if attempt.alive is None:
        return "running", f"on {attempt.host}, as far as can be told from here"
    return ("running", f"on {attempt.host}") if attempt.alive else ("lost", f"its process on {attempt.host} is gone")


def _in_slurm(job: Job, attempt: Attempt | None) -> tuple[Standing, str]:
    if job.live == "queued":
        before = f"attempt {attempt.restarts + 2}; {attempt.reason}" if attempt else ""
        return "queued", "; ".join(filter(None, (job.reason, before)))
    if job.live == "running":
        return "running", ""
    told = attempt.reason if attempt else ""
    if job.state == "COMPLETED":
        return "incomplete", f"COMPLETED without a result{f': {told}' if told else ''}"
    if job.state == "CANCELLED":
        return "cancelled", told
    return "failed", told if attempt and attempt.state == "failed" else " ".join(filter(None, (job.state, told)))


def _forgotten(array: Array, attempt: Attempt | None) -> tuple[Standing, str]:
    """SLURM knows nothing (any more); what the attempt left behind must do."""
    if array.error is not None:
        return "failed", f"not submitted: {array.error}"
    if array.job is None:
        return "lost", "its submission was cut short"
    if attempt is None:
        return "lost", f"SLURM no longer knows job {array.job}, and it left no trace"
    if attempt.state is not None:
        return _ended(attempt)
    return "lost", f"SLURM no longer knows job {attempt.job}, and it ended without a word (killed?)"


def _ended(attempt: Attempt) -> tuple[Standing, str]:
    assert attempt.state is not None
    if attempt.state == "done":
        return "incomplete", "ended without a result"
    if attempt.state in ("failed", "stopped"):
        return ("failed" if attempt.state == "failed" else "stopped"), attempt.reason
    return "incomplete", attempt.reason or attempt.state


def _budget(folder: RunFolder) -> float:
    """Planned FLOPs; 0 where no plan can be read."""
    try:
        return float(json.loads(folder.plan.read_text(encoding="utf-8"))["budget"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _label(row: dict[str, Any]) -> dict[str, str]:
    """What tells a point from its neighbours: the manifest row's plain values."""
    return {k.replace("_", " "): str(v) for k, v in row.items() if k != "id" and isinstance(v, str | int | float)}
