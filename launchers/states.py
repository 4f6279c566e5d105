"""How each point of a sweep stands: what SLURM says of its job, joined with what lies in its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from launchers import Progress, attempts, cluster, jobs
from launchers.attempts import Attempt
from launchers.cluster import Job
from launchers.jobs import Array
from race_sweeps import manifest
from race_sweeps.folder import RunFolder
from race_sweeps.progress import progress

FOLDER = ".slurm"
"""Within the sweep's folder: SLURM's scripts and logs, and submitit's pickles."""

Standing = Literal["done", "running", "queued", "pending", "stopped", "cancelled", "incomplete", "lost", "failed"]
"""pending: never started. stopped: was asked to end, saved its work and did. incomplete: its job is COMPLETED, but
there is no result. lost: was submitted or started, and nothing is known of its end."""

STANDINGS: tuple[Standing, ...] = get_args(Standing)
"""The worse, the later."""

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
    submissions: dict[str, _Submission] = {}
    for array in jobs.load(sweep):
        elements = array.elements()
        submissions |= {p: _Submission(array, elements.get(p, "")) for p in array.points if p in folders}
    slurm = _ask([submission for point, submission in submissions.items() if not folders[point].done])
    return [_join(folders[point], labels.get(point, {}), submissions.get(point), slurm) for point in ids]


@dataclass(frozen=True)
class _Submission:
    """A point's newest array, and its element there (empty if SLURM never took it)."""

    array: Array
    element: str


@dataclass(frozen=True)
class _Slurm:
    """What SLURM knows: elements, and the arrays it knows any element of."""

    jobs: dict[str, Job]
    arrays: frozenset[str]


def _ask(submissions: Sequence[_Submission]) -> _Slurm:
    found = cluster.queue(submission.array.job for submission in submissions if submission.array.job)
    gone = {s.array.job for s in submissions if s.array.job and s.element not in found}
    found = cluster.accounts(gone) | found
    return _Slurm(found, frozenset(element.partition("_")[0] for element in found))


def _join(folder: RunFolder, label: dict[str, str], submission: _Submission | None, slurm: _Slurm) -> PointState:
    attempt = attempts.newest(folder.path)
    elsewhere = attempt is not None and not attempt.job
    array, element = (submission.array, submission.element) if submission else (None, "")
    job = slurm.jobs.get(element)
    state: Standing
    if folder.done:
        state, reason = "done", ""
    elif array is None or (elsewhere and not (job and job.live)):
        state, reason = _here(attempt)
    else:
        if attempt and attempt.job != element:
            attempt = None  # of an earlier submission
        state, reason = _in_slurm(job, attempt) if job else _forgotten(array, attempt, array.job in slurm.arrays)
        if state in ("failed", "lost") and (attempt is None or attempt.state is None):
            reason = "; ".join(filter(None, (reason, _last_words(folder, element))))
    restarts = attempt.restarts if attempt else 0
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
        before = (f"for attempt {attempt.restarts + 2}", attempt.reason) if attempt else ()
        return "queued", "; ".join(filter(None, (job.reason, *before)))
    if job.live == "running":
        return "running", ""
    told = attempt.reason if attempt else ""
    if job.state == "COMPLETED":
        return "incomplete", f"COMPLETED without a result{f': {told}' if told else ''}"
    if job.state == "CANCELLED":
        return "cancelled", told
    return "failed", told if attempt and attempt.state == "failed" else "; ".join(filter(None, (job.state, told)))


def _forgotten(array: Array, attempt: Attempt | None, others: bool) -> tuple[Standing, str]:
    """SLURM knows nothing (any more); what the attempt left behind must do. others: it knows the rest of the array."""
    if array.error is not None:
        return "failed", f"not submitted: {array.error}"
    if array.job is None:
        return "lost", "its submission was cut short"
    if attempt is None and others:  # SLURM drops an element that is cancelled while it is nothing but a number
        return "cancelled", "before it began"
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


def _last_words(folder: RunFolder, element: str) -> str:
    """What SLURM wrote about a job that could not say anything itself: killed for memory, failed to start, ..."""
    try:
        text = slurm_log(folder.path.parents[1], element).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("submitit INFO")]
    lines = [line for line in lines if "error: ***" not in line]  # that it was ended, not why
    own = [line for line in lines if not line.startswith("srun: ")]
    errors = [line for line in lines if "error: " in line]
    last = (own or errors or lines or [""])[-1]
    return last.partition("error: ")[2] or last


def slurm_log(sweep: Path, element: str) -> Path:
    """What SLURM and submitit have to say of a job; what the point prints is in its folder."""
    return sweep / FOLDER / f"{element}_0_log.out"


def _budget(folder: RunFolder) -> float:
    """Planned FLOPs; 0 where no plan can be read."""
    try:
        return float(json.loads(folder.plan.read_text(encoding="utf-8"))["budget"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _label(row: dict[str, Any]) -> dict[str, str]:
    """What tells a point from its neighbours: the manifest row's plain values."""
    return {k.replace("_", " "): str(v) for k, v in row.items() if k != "id" and isinstance(v, str | int | float)}
