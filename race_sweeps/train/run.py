"""One grid point from its folder to its `result.json`; resumes what an earlier attempt left."""

from __future__ import annotations

import datetime
import errno
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from race_sweeps import config as configuration
from race_sweeps import data, ledger, models, rewards, rollouts, tracking
from race_sweeps.allocate import Allocator
from race_sweeps.config import RunConfig
from race_sweeps.errors import Busy, Stopped, UserError
from race_sweeps.evaluate import Evaluation, evaluate
from race_sweeps.flops import Flops
from race_sweeps.folder import (
    RunFolder,
    append_rows,
    json_line,
    read_rows,
    rewrite_rows,
    single_writer,
    write_json,
)
from race_sweeps.ledger import LedgerWriter, Row, Tokens
from race_sweeps.plan import Plan, costs, plan
from race_sweeps.rewards import Scores
from race_sweeps.train import checkpoints
from race_sweeps.train.trainer import AllocatedGRPOTrainer

log = logging.getLogger("race_sweeps")
SHOWN_COMPLETIONS = 64
SPARE_BYTES = 2**24  # less than that left beside a failed write: the disk is full


def run_point(path: str) -> None:
    """Run the grid point whose `config.yaml` is in the folder `path`. Returns at once when it is done.

    Raises `Busy` when another process is writing the folder, `Stopped` when SIGTERM made it checkpoint and end.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func: pinned and tested
    folder = RunFolder(Path(path))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    transformers_logging.disable_progress_bar()
    config = configuration.load(folder.config.read_text(encoding="utf-8"))
    with single_writer(folder) as mine:
        if not mine:
            raise Busy(f"{folder.path}: another process is running this point")
        if not folder.done:
            with _full_disk_in_one_line(folder), tracking.tracker(config.tracking, folder) as tracker:
                PointRun(config, folder, tracker).execute()
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


class PointRun:
    """State of one attempt at a point."""

    def __init__(self, config: RunConfig, folder: RunFolder, tracker: tracking.Tracker | None = None) -> None:
        self.config, self.folder = config, folder
        self.tracker = tracker or tracking.Tracker()
        self.plan: Plan = plan(config)
        self.policy = models.policy_flops(config)
        self.stop_requested = False
        self.extra_callbacks: list[TrainerCallback] = []  # for whoever wants to watch the training loop
        self.saved_at = time.monotonic()
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
        start = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
        for rows in (folder.metrics, folder.evals):
            rewrite_rows(rows, lambda row: row["step"] <= start)
        self.writer = LedgerWriter(folder.ledger, resume_step=start, on_torn=log.warning)
        for row in ledger.read(folder.ledger).rows:
            self.allocator.record(row)
        if found is not None:
            self._check_ledger(*found)
        self.evaluated = {row["rung"] for row in read_rows(folder.evals)}
        if self.writer.attempt > 1:
            log.info("attempt %d continues after step %d", self.writer.attempt, start)
        if start:
            self.tracker.permanent(start)

    def record(self, *rows: Row) -> None:
        """Make ledger rows durable and let the allocator know."""
        mine = [replace(row, attempt=self.writer.attempt) for row in rows]
        self.writer.write(mine)
        for row in mine:
            self.allocator.record(row)

    def execute(self) -> None:
        """Train to the budget and write `result.json`."""
        self.train()
        if self.stop_requested and not self.allocator.finished:
            raise Stopped(f"{self.folder.path}: checkpointed at step {self.trainer.state.global_step}")
        self._write_result()

    def train(self) -> None:
        """Load the policy and train it until the budget is spent or a stop is requested."""
        config = self.config
        location = models.prepare(config)
        self.weights = Path(location).name
        tokenizer = AutoTokenizer.from_pretrained(location, padding_side="left")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, config.model.dtype)).to(device)
        self.problems = data.load(config, chat=tokenizer.chat_template is not None)
        self.reward = rewards.make(config, model, tokenizer)
        write_json(self.folder.data, self.problems.report)
        self.judge = rewards.judge(config)
        with closing(rollouts.make(config, location, tokenizer, self.policy)) as self.engine:
            self._train(model, tokenizer)

    def _train(self, model: Any, tokenizer: Any) -> None:
        self.trainer = AllocatedGRPOTrainer(
            self.config,
            self.folder,
            model,
            tokenizer,
            self.problems.train,
            self.reward,
            self.engine,
            self.policy,
            self.allocator,
            self.record,
            callbacks=[_Steps(self), *self.extra_callbacks],
        )
        self.trainer.remove_callback(PrinterCallback)
        self._check_shape(model)
        sets = (self.problems.train, *self.problems.evals.values())
        prompts = [problem["prompt"] for problems in sets for problem in problems]
        self.engine.check(model, prompts, self.config.rollout.max_completion)
        signal.signal(signal.SIGTERM, self._request_stop)
        if 0 not in self.evaluated:
            self._evaluate(0, [0])
        if not self.allocator.finished:
            self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)

    def _check_ledger(self, checkpoint: Path, expected: int) -> None:
        """The ledger must hold exactly what had been spent when the checkpoint was written."""
        if self.allocator.spent.total != expected:
            raise UserError(
                f"{self.folder.ledger}: holds {self.allocator.spent.total} FLOPs, but {checkpoint.name} was written at "
                f"{expected}; restore the ledger from a copy, or remove {self.folder.checkpoints} to start over"
            )

    def _check_shape(self, model: Any) -> None:
        """The planned shape must be the loaded model's, or every FLOP would be wrong."""
        from race_sweeps.flops import ModelShape

        loaded = ModelShape.from_config(model.config.to_dict(), "the loaded model")
        if loaded != self.policy.shape:
            raise UserError(f"model {self.config.model.name}: planned sizes {self.policy.shape} differ from {loaded}")

    def _request_stop(self, *_: Any) -> None:
        log.info("SIGTERM: checkpointing at the end of this generation")
        self.stop_requested = True

    # --- during training (called by the trainer's callback) ---------------------------------------------------------

    def end_of_generation(self, step: int) -> tuple[bool, bool]:
        """Evaluate the rungs that were reached. Returns whether to checkpoint, and whether to stop."""
        reached = [
            number
            for number, rung in enumerate(self.plan.rungs, 1)
            if number not in self.evaluated and self.allocator.reached(rung)
        ]
        if reached:
            self._evaluate(step, reached)
            self._write_rollouts(step)
        stop = self.allocator.finished or self.stop_requested
        due = time.monotonic() - self.saved_at >= self.config.train.checkpoint_seconds
        return stop or due, stop

    def _evaluate(self, step: int, rungs: list[int]) -> None:
        """Evaluate once; a row for each of `rungs` (several when one step passed them; 0 is before training)."""
        spent = self.allocator.spent if step else ledger.Totals()
        phases = ("search", "learning", "reward")
        common = {
            "flops": {**{p: spent.model(p) for p in phases}, "total": spent.total},
            "rho": spent.rho,
            "seconds": round(sum(spent.seconds[p] for p in phases), 3),
        }
        rows, cost = [], Row(step, "eval", Flops(), Tokens(), 0, 0.0)
        for name, problems in self.problems.evals.items():
            result = evaluate(
                self.trainer.model, self.engine, self.reward, self.judge, self.policy, name, problems, self.config
            )
            cost = cost.plus(result.flops, result.tokens, result.completions, result.seconds)
            for rung in rungs:
                self._write_outcomes(rung, name, result)
                budget = self.plan.rungs[rung - 1] if rung else 0
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
                rows.append(
                    {"v": 1, "step": step, "rung": rung, "budget": budget, **result.metrics, **common, "time": now}
                )
            log.info("rung %s at step %d: %s pass@1 %.3f", rungs, step, name, result.metrics["pass@1"])
        self.record(cost)
        append_rows(self.folder.evals, rows)
        self.evaluated.update(rungs)

    def _write_outcomes(self, rung: int, name: str, result: Evaluation) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        path = self.folder.outcomes(rung, name)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        parquet.write_table(arrow.table(result.outcomes), unfinished)
        unfinished.replace(path)

    def _write_rollouts(self, step: int) -> None:
        """A sample of the last generation's completions, for people to read."""
        import pyarrow as arrow
        from pyarrow import parquet

        shown = self.trainer.generation
        if shown is None:
            return
        self.folder.rollouts.mkdir(exist_ok=True)
        n = min(SHOWN_COMPLETIONS, len(shown.completions))
        table = arrow.table(
            {
                "step": [step] * n,
                "question": [p["question"] for p in shown.problems[:n]],
                "answer": [p["answer"] for p in shown.problems[:n]],
                "completion": shown.completions[:n],
                "reward": shown.rewards[:n],
                "advantage": shown.advantages[:n],
                "passes": shown.trained[:n],
            }
        )
        parquet.write_table(table, self.folder.rollouts / f"step-{step:06d}.parquet")

    def checkpoint_saved(self, step: int) -> None:
        """Mark a checkpoint usable once its files are on disk."""
        self.writer.sync()
        checkpoints.seal(self.folder.checkpoints / f"checkpoint-{step}", self.allocator.spent.total)
        self.saved_at = time.monotonic()
        self.tracker.permanent(step)

    def _write_result(self) -> None:
        self.writer.sync()
        book = ledger.read(self.folder.ledger)
        totals, config = book.totals, self.config
        phases = ("search", "learning", "reward")

        def sums(convention: str) -> dict[str, int]:
            parts = {p: int(getattr(totals.flops[p], convention)) for p in phases}
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
                "simulated": False,
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


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Ledger, metrics, rungs and checkpoints at the end of optimizer steps."""

    def __init__(self, run: PointRun) -> None:
        self.run = run

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()
        self.other = self.run.trainer.work_seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run, trainer = self.run, self.run.trainer
        elapsed = time.perf_counter() - self.started - (trainer.work_seconds - self.other)
        flops, tokens, rows = trainer.step_work()
        run.record(Row(state.global_step, "learning", flops, tokens, rows, elapsed))
        self.rows = rows
        if trainer.between_generations:
            control.should_save, control.should_training_stop = run.end_of_generation(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        run, spent, logs = self.run, self.run.allocator.spent, logs or {}
        if "loss" not in logs:  # the summary at the end of training
            return
        phases = ("search", "learning", "reward")
        generation = run.trainer.generation
        row = {
            "v": 1,
            "step": state.global_step,
            "generation": generation.index if generation else 0,
            "completions": spent.rows["search"],
            "rows": self.rows,
            **{f"flops_{p}": spent.model(p) for p in phases},
            "flops_total": spent.total,
            "rho": spent.rho,
            "reward": sum(generation.rewards) / len(generation.rewards) if generation else None,
            **(_reward_parts(generation.scores) if generation else {}),
            "completion_length": logs.get("completions/mean_length"),
            **{k: v for k, v in logs.items() if k not in ("epoch", "reward") and not k.startswith("rewards/")},
        }
        clean = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in row.items()}
        with run.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(json_line(clean))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.checkpoint_saved(state.global_step)


def _reward_parts(scores: Scores) -> dict[str, float]:
    """Means of a generation's reward components, and its events (verifier time-outs, truncated texts)."""
    means = {f"reward/{name}": sum(values) / len(values) for name, values in scores.components.items()}
    return {**means, **scores.counts}
