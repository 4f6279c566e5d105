"""One grid point from its folder to its `result.json`; resumes what an earlier attempt left."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from race_sweeps import data, models, rewards, rollouts, tracking
from race_sweeps.config import RunConfig
from race_sweeps.errors import Stopped, UserError
from race_sweeps.evaluate import Evaluation, evaluate
from race_sweeps.flops import Flops
from race_sweeps.folder import (
    RunFolder,
    append_rows,
    json_line,
    write_json,
)
from race_sweeps.ledger import Row, Tokens
from race_sweeps.rewards import Scores
from race_sweeps.train import checkpoints
from race_sweeps.train.attempt import Attempt, run
from race_sweeps.train.trainer import AllocatedGRPOTrainer

log = logging.getLogger("race_sweeps")
SHOWN_COMPLETIONS = 64


def run_point(path: str) -> None:
    """Train the grid point whose `config.yaml` is in the folder `path`, as `attempt.run` says."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func: pinned and tested
    transformers_logging.disable_progress_bar()
    run(path, PointRun)


class PointRun(Attempt):
    """State of one attempt at a point that TRL trains."""

    def __init__(self, config: RunConfig, folder: RunFolder, tracker: tracking.Tracker | None = None) -> None:
        super().__init__(config, folder, tracker)
        self.extra_callbacks: list[TrainerCallback] = []  # for whoever wants to watch the training loop
        self.saved_at = time.monotonic()

    def execute(self) -> None:
        """Train to the budget and write `result.json`."""
        self.train()
        if self.stop_requested and not self.allocator.finished:
            raise Stopped(f"{self.folder.path}: checkpointed at step {self.trainer.state.global_step}")
        self.write_result()

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
        signal.signal(signal.SIGTERM, self.request_stop)
        if 0 not in self.evaluated:
            self._evaluate(0, [0])
        if not self.allocator.finished:
            self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)

    def _check_shape(self, model: Any) -> None:
        """The planned shape must be the loaded model's, or every FLOP would be wrong."""
        from race_sweeps.flops import ModelShape

        loaded = ModelShape.from_config(model.config.to_dict(), "the loaded model")
        if loaded != self.policy.shape:
            raise UserError(f"model {self.config.model.name}: planned sizes {self.policy.shape} differ from {loaded}")

    # --- during training (called by the trainer's callback) ---------------------------------------------------------

    def end_of_generation(self, step: int) -> tuple[bool, bool]:
        """Evaluate the rungs that were reached. Returns whether to checkpoint, and whether to stop."""
        reached = self.rungs_reached()
        if reached:
            self._evaluate(step, reached)
            self._write_rollouts(step)
        stop = self.allocator.finished or self.stop_requested
        due = time.monotonic() - self.saved_at >= self.config.train.checkpoint_seconds
        return stop or due, stop

    def _evaluate(self, step: int, rungs: list[int]) -> None:
        """Evaluate once; a row for each of `rungs` (several when one step passed them; 0 is before training)."""
        rows, cost = [], Row(step, "eval", Flops(), Tokens(), 0, 0.0)
        for name, problems in self.problems.evals.items():
            result = evaluate(
                self.trainer.model, self.engine, self.reward, self.judge, self.policy, name, problems, self.config
            )
            cost = cost.plus(result.flops, result.tokens, result.completions, result.seconds)
            for rung in rungs:
                self._write_outcomes(rung, name, result)
                rows.append(self.eval_row(step, rung, result.metrics))
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
