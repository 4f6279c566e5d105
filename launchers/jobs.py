"""The jobs of a sweep, as its manifest lists them: one entry per array, written before SLURM is asked and again after.

An entry without job id and without error is a submission that was cut short; its unique name finds the job, if any.
"""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from launchers import cluster
from race_sweeps import manifest
from race_sweeps.errors import UserError, choices

KEY = "jobs"


@dataclass(frozen=True)
class Shape:
    """What is asked of SLURM for each point of an array; None leaves it to the cluster's default.

    signal_seconds: warning before the time limit, for the checkpoint. max_requeues: how often SLURM may start a point
    again, for whatever reason. setup: shell lines run first. sbatch: any other option, by its long name. snapshot: the
    jobs run a copy of the code as it was when they were submitted.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int = 4
    mem_gb: float | None = None
    timeout_min: int | None = None
    array_parallelism: int = 256
    signal_seconds: int = 120
    max_requeues: int = 20
    setup: list[str] = field(default_factory=list)
    sbatch: dict[str, Any] = field(default_factory=dict)
    snapshot: bool = True

    def replace(self, changes: dict[str, Any], where: str) -> Shape:
        """With other values. Raises `UserError` for unknown names; `where` says who set them."""
        names = [item.name for item in fields(Shape)]
        for name in changes:
            if name not in names:
                raise UserError(f"{where}: {name}: {choices(name, names)}")
        return dataclasses.replace(self, **changes)

    def check(self, where: str) -> None:
        """Raise `UserError` for values that cannot work."""
        for name in ("cpus_per_task", "mem_gb", "timeout_min", "array_parallelism", "signal_seconds"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise UserError(f"{where}.{name}={value}: must be a positive number")
        for name in ("gpus_per_node", "max_requeues"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise UserError(f"{where}.{name}={value}: must be 0 or more")
        if self.timeout_min is not None and self.signal_seconds >= 60 * self.timeout_min:
            raise UserError(
                f"{where}.signal_seconds={self.signal_seconds}: the warning must come within the time limit of "
                f"{self.timeout_min} min"
            )


@dataclass(frozen=True)
class Array:
    """One submission: the points in the order of their array index. `code`: the snapshot they run, in `.slurm`."""

    name: str
    entry: str
    shape: Shape
    points: list[str]
    job: str | None = None
    error: str | None = None
    time: str = ""
    code: str | None = None

    @staticmethod
    def new(stem: str, entry: str, shape: Shape, points: Sequence[str]) -> Array:
        """A submission to be, with a name no other job has."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Array(f"{stem}-{uuid.uuid4().hex[:8]}", entry, shape, list(points), time=now)

    @staticmethod
    def from_json(row: dict[str, Any]) -> Array:
        return Array(**(row | {"shape": Shape(**row["shape"])}))

    def elements(self) -> dict[str, str]:
        """SLURM's id of each point."""
        if self.job is None:
            return {}
        alone = len(self.points) == 1  # submitit makes an array of several only
        return {point: cluster.element(self.job, None if alone else i) for i, point in enumerate(self.points)}


def load(folder: Path) -> list[Array]:
    """Every submission of the sweep in `folder`, oldest first.

    Asks SLURM only about those that were cut short; an id found so is kept, for SLURM soon forgets names.
    """
    path = folder / manifest.NAME
    try:
        arrays = [Array.from_json(row) for row in manifest.read(folder).get(KEY, [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {KEY}: not the jobs this program writes ({error!r}); move the key away") from None
    ids = cluster.named(array.name for array in arrays if array.job is None and array.error is None)
    if not ids:
        return arrays
    arrays = [dataclasses.replace(a, job=ids[a.name]) if a.name in ids else a for a in arrays]
    with suppress(OSError):  # a reader who may not write
        write(folder, *[array for array in arrays if array.name in ids])
    return arrays


def write(folder: Path, *arrays: Array) -> None:
    """Add `arrays` to the manifest, or replace those of the same name."""
    with manifest.edit(folder) as content:
        listed = {row["name"]: row for row in content.get(KEY, [])}
        listed |= {array.name: asdict(array) for array in arrays}
        content[KEY] = list(listed.values())
