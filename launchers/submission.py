"""Hands points to SLURM as submitit arrays, and leaves no submission without a trace in the manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import launchers
import race_sweeps
from launchers import cluster, jobs
from launchers.jobs import Array, Shape
from launchers.process import thread_settings
from launchers.states import FOLDER
from race_sweeps.errors import UserError
from race_sweeps.manifest import exclusive


@dataclasses.dataclass(frozen=True)
class Request:
    """Points of one entry point and one shape."""

    entry: str
    shape: Shape
    points: tuple[str, ...]


def grouped(wanted: Iterable[tuple[str, Shape, str]]) -> list[Request]:
    """Requests for (entry point, shape, point), one for all that share the first two."""
    found: dict[str, Request] = {}
    for entry, shape, point in wanted:
        before = found.get(f"{entry} {shape}", Request(entry, shape, ()))
        found[f"{entry} {shape}"] = dataclasses.replace(before, points=(*before.points, point))
    return list(found.values())


def lock(sweep: Path) -> AbstractContextManager[None]:
    """One submission into a sweep at a time: what is queued is asked, and what is not is submitted, in one go."""
    return exclusive(private_folder(sweep) / ".lock")


def private_folder(sweep: Path) -> Path:
    """The folder for scripts, pickles and SLURM's own logs of a sweep; unpickling what lies there runs it, so only
    its owner may look inside. Raises `UserError` if it cannot be so."""
    folder = sweep / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise UserError(f"{folder}: belongs to another user; launch into a sweep of your own (sweep=NAME)")
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose another runs_dir") from None
    return folder


def submit(sweep: Path, requests: Sequence[Request]) -> list[Array]:
    """Submit `requests`, cut at the cluster's MaxArraySize; returns the arrays with their job ids.

    The caller holds the sweep's submission lock. Raises `UserError` when SLURM refuses, naming what had been accepted
    before.
    """
    if not requests:
        return []
    folder = private_folder(sweep)
    largest = cluster.max_array_size()
    arrays = [
        Array.new(sweep.name, request.entry, request.shape, request.points[start : start + largest])
        for request in requests
        for start in range(0, len(request.points), largest)
    ]
    done: list[Array] = []
    try:
        jobs.write(sweep, *arrays)
        for array in arrays:
            code = code_path(folder) if array.shape.snapshot else source_path()
            job = _sbatch(sweep, folder, array, code)
            done.append(dataclasses.replace(array, job=job, code=code[0].name if array.shape.snapshot else None))
            jobs.write(sweep, done[-1])
    except (UserError, OSError) as error:
        text = str(error) if isinstance(error, UserError) else f"{error.filename or folder}: {error.strerror}"
        with suppress(UserError):  # SLURM may have taken a job whose files could not be completed
            cluster.cancel(list(cluster.named(array.name for array in arrays[len(done) :]).values()))
        with suppress(OSError):  # the disk may be full; then the names written first are the trace
            jobs.write(sweep, *[dataclasses.replace(array, error=text) for array in arrays[len(done) :]])
        accepted = f"; submitted before that: {', '.join(f'job {array.job}' for array in done)}" if done else ""
        raise UserError(f"{text}{accepted}") from None
    return done


def _sbatch(sweep: Path, folder: Path, array: Array, code: list[Path]) -> str:
    """Submit one array; returns its job id."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from launchers.slurm_task import SlurmTask

    shape = array.shape
    executor = SlurmExecutor(folder)
    executor.update_parameters(job_name=array.name, **_parameters(shape, code))
    points = sweep / "points"
    tasks = [
        SlurmTask(str(points / point), array.entry, shape.cpus_per_task, shape.max_requeues) for point in array.points
    ]
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints what it raises
            submitted = executor.submit_array(tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(_explain(str(error), shape)) from None
    return str(submitted[0].job_id).partition("_")[0]


def _parameters(shape: Shape, code: list[Path]) -> dict[str, Any]:
    """submitit's parameters for a shape."""
    places = [str(path) for path in code] + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    variables = thread_settings(shape.cpus_per_task) | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(places)),
        "PYTHONSAFEPATH": "1",  # else the folder the job starts in comes before the snapshot
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    options = {
        "partition": shape.partition,
        "account": shape.account,
        "qos": shape.qos,
        "constraint": shape.constraint,
        "gpus_per_node": shape.gpus_per_node or None,
        "mem": None if shape.mem_gb is None else f"{round(shape.mem_gb * 1024)}M",
        "time": shape.timeout_min,
    }
    return {name: value for name, value in options.items() if value is not None} | {
        "cpus_per_task": shape.cpus_per_task,
        "array_parallelism": shape.array_parallelism,
        "signal_delay_s": shape.signal_seconds,
        "setup": [*exports, *shape.setup],
        "stderr_to_stdout": True,
        "srun_args": [f"--cpus-per-task={shape.cpus_per_task}"],  # since SLURM 22.05 srun does not take the job's
        "additional_parameters": {"requeue": True, **shape.sbatch},
    }


def source_path() -> list[Path]:
    """Where the code lies that runs now."""
    return list(
        dict.fromkeys(Path(str(package.__file__)).absolute().parents[1] for package in (launchers, race_sweeps))
    )


def _packages() -> list[Path]:
    return [Path(str(package.__file__)).absolute().parent for package in (launchers, race_sweeps)]


def code_path(folder: Path) -> list[Path]:
    """A copy of the packages as they are now, made once for each state of them, then where they came from.

    What is queued thus keeps its code when a branch is changed or a file edited; entry points of other packages are
    found beside the original.
    """
    files = {
        path.relative_to(package.parent): path.read_bytes()
        for package in _packages()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    copy = folder / f"code-{digest.hexdigest()[:12]}"
    if not copy.exists():
        draft = folder / f".{copy.name}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        for name, content in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(content)
        draft.rename(copy)
    return [copy, *source_path()]


def _explain(text: str, shape: Shape) -> str:
    """sbatch's complaint in one line, with what would work where that can be told."""
    reason = cluster.complaint(text)
    if "partition" in reason.lower():
        return f"SLURM: partition={shape.partition}: {reason}; valid: {', '.join(cluster.partitions())}"
    asked = {name: value for name, value in dataclasses.asdict(shape).items() if value}
    return f"SLURM: {reason}; asked for {', '.join(f'{name}={value}' for name, value in asked.items())}"
