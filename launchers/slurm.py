"""Hands a sweep to SLURM and returns at once; nothing on this machine waits for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers import Outcome, Progress, Task, cluster, states, submission
from launchers.jobs import Array, Shape
from race_sweeps import manifest
from race_sweeps.errors import UserError

WHERE = "hydra.launcher"
STEPS = (15, 30, 60, 120, 240, 480, 720, 1440, 2880, 4320, 7200, 10080)
"""Time limits in minutes: few different ones, for each is an array of its own."""


@dataclass(frozen=True)
class SlurmLauncher(Shape):
    """Submits one array per shape; what is done, queued or running already is left alone.

    The fields of `Shape` hold for every task; `by_label` changes them for tasks with that label, e.g.
    `{"model=7b": {"mem_gb": 96}}`, the last one that fits winning. gpus_per_node None: as many as the task uses.
    timeout_min None: the task's expected hours times `margin` plus `startup_min`, at most `max_timeout_min`, which is
    also the limit where nothing is known; what takes longer is checkpointed and put back into the queue.
    """

    by_label: dict[str, dict[str, Any]] = field(default_factory=dict)
    margin: float = 1.5
    startup_min: float = 10.0
    max_timeout_min: int = 1440

    def check(self, where: str = WHERE) -> None:
        """Raise `UserError` for settings that cannot work, or where there is no SLURM."""
        super().check(where)
        for label, changes in self.by_label.items():
            place = f"{where}.by_label.{label}"
            if "=" not in label or not isinstance(changes, Mapping):
                raise UserError(f"{place}: write a label and its settings, for example 'model=7b': {{mem_gb: 96}}")
            self._shape().replace(dict(changes), place).check(place)
        cluster.require()

    def launch(
        self, tasks: Sequence[Task], progress: Callable[[Path], Progress], unit: Callable[[float], str]
    ) -> list[Outcome]:
        """Submit `tasks`, which are points of one sweep, and return "submitted" for each, with its job.

        Raises `UserError` when SLURM refuses, or the sweep's folder cannot be written.
        """
        self.check()
        if not tasks:
            return []
        sweeps = {task.folder.absolute().parents[1] for task in tasks}
        if len(sweeps) > 1 or any(task.folder.name != task.id for task in tasks):
            raise ValueError("a launch takes points of one sweep, in <sweep>/points/<id>")
        sweep = sweeps.pop()
        with submission.lock(sweep):
            known = {point.id: point for point in states.look(sweep, [task.id for task in tasks])}
            new = [task for task in tasks if known[task.id].state not in ("done", *states.OPEN)]
            requests = submission.grouped((task.entry, self.shape(task), task.id) for task in new)
            arrays = submission.submit(sweep, requests)
        job_of = {point: element for array in arrays for point, element in array.elements().items()}
        return [
            Outcome(task.id, "submitted", "", 0.0, job_of[task.id])
            if task.id in job_of
            else _left_alone(known[task.id])
            for task in tasks
        ]

    def shape(self, task: Task) -> Shape:
        """What is asked of SLURM for one task."""
        shape = self._shape()
        for label, changes in self.by_label.items():
            name, _, value = label.partition("=")
            if task.label.get(name) == value:
                shape = shape.replace(dict(changes), f"{WHERE}.by_label.{label}")
        gpus = task.gpus if shape.gpus_per_node is None else shape.gpus_per_node
        minutes = self._minutes(task.hours) if shape.timeout_min is None else shape.timeout_min
        return dataclasses.replace(shape, gpus_per_node=gpus, timeout_min=minutes)

    def _shape(self) -> Shape:
        return Shape(**{item.name: getattr(self, item.name) for item in dataclasses.fields(Shape)})

    def _minutes(self, hours: float | None) -> int:
        if hours is None:
            return self.max_timeout_min
        needed = math.ceil(hours * 60 * self.margin + self.startup_min)
        return min(self.max_timeout_min, next((step for step in STEPS if step >= needed), needed))


def _left_alone(point: states.PointState) -> Outcome:
    if point.state == "done":
        return Outcome(point.id, "done", "", 0.0)
    return Outcome(point.id, "submitted", f"{point.state} already", 0.0, point.job)


def resubmit(sweep: Path, standings: Collection[str], changes: Mapping[str, Any]) -> list[Array]:
    """Submit again the points that stand so, in the shape they had, with `changes`.

    Raises `UserError` where SLURM never had a point of this sweep, or for changes that cannot work.
    """
    cluster.require()
    with submission.lock(sweep):
        points = states.look(sweep)
        if not any(point.array for point in points):
            command = " ".join(manifest.read(sweep).get("command", []))
            raise UserError(f"{sweep}: no point of it was ever given to SLURM; run its command again: {command}")
        wanted = [
            (point.array.entry, point.array.shape.replace(dict(changes), "resume"), point.id)
            for point in points
            if point.array and point.state in standings
        ]
        for _, shape, _ in wanted:
            shape.check("resume")
        return submission.submit(sweep, submission.grouped(wanted))
