"""What SLURM knows: one call of a command for all jobs at once."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from race_sweeps.errors import UserError

LIVE = {"PENDING": "queued", "CONFIGURING": "queued", "REQUEUED": "queued", "REQUEUE_FED": "queued",
        "REQUEUE_HOLD": "queued", "SPECIAL_EXIT": "queued", "RESV_DEL_HOLD": "queued",
        "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STOPPED": "running",
        "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running"}  # fmt: skip
"""SLURM's states of jobs that have not ended: whether they wait or run."""

SECONDS = 60
"""A controller that has not answered by then is not going to."""

ARGUMENTS = 500
"""Job ids in one command line."""


@dataclass(frozen=True)
class Job:
    """One array element as SLURM tells of it. `reason`: why it waits, or its exit code."""

    state: str
    reason: str = ""

    @property
    def live(self) -> str | None:
        """`queued` or `running`; None once it has ended."""
        return LIVE.get(self.state)


def element(job: str, index: int | str | None) -> str:
    """One element's id, as SLURM's commands take it; a job that is no array (index None or not a number) has one."""
    return job if index is None or not str(index).isdigit() else f"{job}_{index}"


def require() -> None:
    """Raise `UserError` where there is no SLURM to talk to."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "SLURM: no sbatch on this machine; run this on a login node of the cluster, try the cluster path here with "
            "scripts/mini-slurm start, or use hydra/launcher=local"
        )


def max_array_size() -> int:
    """The most elements one array may have; the controller must answer for this."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]), re.MULTILINE)
    if found is None:
        raise UserError("SLURM: scontrol show config tells no MaxArraySize; is the controller up? (scontrol ping)")
    return int(found[1])


def partitions() -> list[str]:
    """Names of the cluster's partitions."""
    return sorted(set(_run(["sinfo", "-h", "-o", "%R"]).split()))


def queue(jobs: Iterable[str]) -> dict[str, Job]:
    """Elements of the arrays `jobs` that the controller still knows: all that live, and those that ended lately."""
    wanted = sorted(set(jobs))
    if not wanted:
        return {}
    # A single job that is long gone is an error to squeue, several are not.
    listing = _run(["squeue", "-h", "-r", "-t", "all", "-j", ",".join(wanted), "-o", "%F|%K|%T|%r"], "Invalid job id")
    found = {}
    for line in listing.splitlines():
        job, index, state, reason = line.split("|", 3)
        found[element(job, index)] = Job(state, "" if reason == "None" else reason)
    return found


def named(names: Iterable[str]) -> dict[str, str]:
    """Ids of the arrays with these names, of those the controller still knows."""
    wanted = sorted(set(names))
    if not wanted:
        return {}
    listing = _run(["squeue", "-h", "-t", "all", f"--name={','.join(wanted)}", "-o", "%j|%F"])
    return dict(line.split("|", 1) for line in listing.splitlines())


def accounts(jobs: Iterable[str]) -> dict[str, Job]:
    """What accounting remembers of the arrays `jobs`; nothing where there is no accounting."""
    wanted = sorted(set(jobs))
    if not wanted or shutil.which("sacct") is None:
        return {}
    try:
        listing = _run(["sacct", "-X", "-n", "-P", "-j", ",".join(wanted), "-o", "JobID,State,ExitCode"])
    except UserError:
        return {}
    found: dict[str, Job] = {}
    for line in listing.splitlines():
        identity, state, code = line.split("|", 2)
        # "CANCELLED by 1000" and the like
        job = Job(state.split()[0], f"exit code {code}" if code != "0:0" else "")
        found |= dict.fromkeys(expand(identity), job)
    return found


def expand(identity: str) -> list[str]:
    """The elements in `12_[0-2,7%4]`, as sacct writes those that have not begun; any other id is itself."""
    ranges = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", identity)
    if ranges is None:
        return [identity]
    ends = [part.partition("-") for part in ranges[2].split(",")]
    return [element(ranges[1], i) for first, _, last in ends for i in range(int(first), int(last or first) + 1)]


def running(job: str) -> bool:
    """Whether the job with this id (of one element, not of its array) runs and is not about to be ended."""
    listing = _run(["scontrol", "-o", "show", "job", job])
    # An array's last element has the array's own id, which stands for all of them.
    mine = next((line for line in listing.splitlines() if re.search(rf"\bJobId={job}\b", line)), "")
    return "JobState=RUNNING" in mine.split()


def requeue(job: str) -> None:
    """Put a running job back into the queue; whoever calls this from within it is ended soon."""
    _run(["scontrol", "requeue", job])


def cancel(elements: Sequence[str]) -> None:
    """End jobs; those that have ended already are no error."""
    for start in range(0, len(elements), ARGUMENTS):
        _run(["scancel", *elements[start : start + ARGUMENTS]], "Invalid job id")


def _run(command: list[str], harmless: str | None = None) -> str:
    """The command's output; `UserError` with its own words when it fails, unless they contain `harmless`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise UserError(f"SLURM: no {command[0]} on this machine; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"SLURM: {command[0]} gave no answer within {SECONDS} s; try again later") from None
    if done.returncode and (harmless is None or harmless not in done.stderr):
        raise UserError(f"SLURM: {complaint(done.stderr) or f'{command[0]} ended with status {done.returncode}'}")
    return done.stdout


def complaint(text: str) -> str:
    """The last and most telling line of what a command of SLURM wrote to stderr, without its preambles."""
    last = (text.strip().splitlines() or [""])[-1]
    return re.sub(r"^\w+: (error|fatal): (Batch job submission failed: )?", "", last)
