"""What every attempt at a grid point does, whatever trains it: take up what an earlier attempt left, account, and say
what came out. No torch."""

from __future__ import annotations

import datetime
import errno
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from race_sweeps import config as configuration
from race_sweeps import ledger, models, tracking
from race_sweeps.allocate import Allocator
from race_sweeps.config import RunConfig
from race_sweeps.errors import Busy, UserError
from race_sweeps.folder import RunFolder, read_rows, rewrite_rows, single_writer, write_json
from race_sweeps.ledger import LedgerWriter, Row
from race_sweeps.plan import Plan, costs, plan
from race_sweeps.train import checkpoints

log = logging.getLogger("race_sweeps")
SPARE_BYTES = 2**24  # less than that left beside a failed write: the disk is full
PHASES = ("search", "learning", "reward")


def run(path: str, kind: Callable[[RunConfig, RunFolder, tracking.Tracker], Attempt]) -> None:
    """Attempt the grid point whose `config.yaml` is in the folder `path`. Returns at once when it is done.

    Raises `Busy` when another process is writing the folder, `Stopped` when SIGTERM made it checkpoint and end.
    """
    folder = RunFolder(Path(path))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    config = configuration.load(folder.config.read_text(encoding="utf-8"))
    with single_writer(folder) as mine:
        if not mine:
            raise Busy(f"{folder.path}: another process is running this point")
        if not folder.done:
            with _full_disk_in_one_line(folder), tracking.tracker(config.tracking, folder) as tracker:
                kind(config, folder, tracker).execute()
                tracker.done()


@contextmanager
def _full_disk_in_one_line(folder: RunFolder) -> Iterator[None]:
    """Torch and safetensors report a full disk as errors of their own: say what it is and what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        free = min(shutil.disk_usage(place).free for place in (folder.path, folder.checkpoints) if place.exists())
        if not full and (isinstance(error, OSError) or free > SPARE_BYTES):
            raise
        raise UserError(
            f"{folder.path}: the disk is full ({free / 2**20:.0f} MiB left); make room and run the same command again: "
            "it continues after the last checkpoint"
        ) from error


class Attempt(ABC):
    """State of one attempt at a point; its trainer is in a subclass. `weights`: what the policy started from."""

    weights = ""

    def __init__(self, config: RunConfig, folder: RunFolder, tracker: tracking.Tracker | None = None) -> None:
        self.config, self.folder = config, folder
        self.tracker = tracker or tracking.Tracker()
        self.plan: Plan = plan(config)
        self.policy = models.policy_flops(config)
        self.stop_requested = False
        train = config.train
        self.allocator = Allocator(
            rho=config.update_fraction.rho,
            rungs=self.plan.rungs,
            group=train.group,
            max_groups=train.prompts,
            max_passes=config.update_fraction.max_passes,
            tolerance=config.budget.tolerance,
            costs=costs(config, self.policy),
        )
        found = checkpoints.newest(folder.checkpoints)
        self.checkpoint = found[0] if found else None
        self.start = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
        for rows in (folder.metrics, folder.evals):
            rewrite_rows(rows, lambda row: row["step"] <= self.start)
        self.writer = LedgerWriter(folder.ledger, resume_step=self.start, on_torn=log.warning)
        for row in ledger.read(folder.ledger).rows:
            self.allocator.record(row)
        if found is not None:
            self._check_ledger(*found)
        self.evaluated = {row["rung"] for row in read_rows(folder.evals)}
        if self.writer.attempt > 1:
            log.info("attempt %d continues after step %d", self.writer.attempt, self.start)
        if self.start:
            self.tracker.permanent(self.start)

    @abstractmethod
    def execute(self) -> None:
        """Train to the budget and write `result.json`; raises `Stopped` after a checkpoint when told to stop."""

    def _check_ledger(self, checkpoint: Any, expected: int) -> None:
        """The ledger must hold exactly what had been spent when the checkpoint was written."""
        if self.allocator.spent.total != expected:
            raise UserError(
                f"{self.folder.ledger}: holds {self.allocator.spent.total} FLOPs, but {checkpoint.name} was written at "
                f"{expected}; restore the ledger from a copy, or remove {self.folder.checkpoints} to start over"
            )

    def record(self, *rows: Row) -> None:
        """Make ledger rows durable and let the allocator know."""
        mine = [replace(row, attempt=self.writer.attempt) for row in rows]
        self.writer.write(mine)
        for row in mine:
            self.allocator.record(row)

    def request_stop(self, *_: Any) -> None:
        """Handler of SIGTERM."""
        log.info("SIGTERM: checkpointing at the end of this generation")
        self.stop_requested = True

    def rungs_reached(self) -> list[int]:
        """Numbers (from 1) of the rungs that C_total has reached and that are not evaluated yet."""
        return [
            number
            for number, rung in enumerate(self.plan.rungs, 1)
            if number not in self.evaluated and self.allocator.reached(rung)
        ]

    def eval_row(self, step: int, rung: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """A row of `evals.jsonl`: `metrics`, and what had been spent (nothing before training, step 0)."""
        spent = self.allocator.spent if step else ledger.Totals()
        return {
            "v": 1,
            "step": step,
            "rung": rung,
            "budget": self.plan.rungs[rung - 1] if rung else 0,
            **metrics,
            "flops": {**{p: spent.model(p) for p in PHASES}, "total": spent.total},
            "rho": spent.rho,
            "seconds": round(sum(spent.seconds[p] for p in PHASES), 3),
            "simulated": self.plan.simulated,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        }

    def write_result(self) -> None:
        """The last file a run writes."""
        self.writer.sync()
        book = ledger.read(self.folder.ledger)
        totals, config = book.totals, self.config

        def sums(convention: str) -> dict[str, int]:
            parts = {p: int(getattr(totals.flops[p], convention)) for p in PHASES}
            return {**parts, "total": sum(parts.values())}

        write_json(
            self.folder.result,
            {
                "v": 1,
                "point": self.folder.point_id,
                "status": "done",
                "stage": config.stage,
                "model": config.model.name,
                "reward": config.reward.name,
                "update_fraction": config.update_fraction.name,
                "seed": config.seed,
                "weights": self.weights,
                "simulated": self.plan.simulated,
                "planned": {"rho": self.plan.rho, "flops": self.plan.budget},
                "flops": {**sums("model"), "eval": totals.model("eval"), "lost": book.lost_flops},
                "executed_flops": sums("executed"),
                "paper_flops": sums("paper"),
                "rho": totals.rho,
                "steps": max((row.step for row in book.rows), default=0),
                "generations": self.allocator.generations,
                "completions": totals.rows["search"],
                "trained": totals.rows["learning"],
                "attempts": book.attempts,
                "seconds": {p: round(s, 3) for p, s in totals.seconds.items()},
            },
        )
