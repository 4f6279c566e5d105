"""Seconds per optimizer step of our trainer over a plain TRL GRPO script with the same settings.

Both train the same policy on the same problems with the same group size, batch sizes, lengths and optimizer, all
completions kept and one pass. Blocks of steps alternate between the two, so that drift of the machine hits both. Ours
includes the ledger, the metrics and the allocator; evaluation and checkpoints are in neither.

    python -m benchmarks.step_overhead [BLOCKS] [STEPS]
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from race_sweeps import config as configuration
from race_sweeps import data, models, rewards
from race_sweeps.compose import compose_points
from race_sweeps.config import RunConfig
from race_sweeps.folder import RunFolder, write_atomic
from race_sweeps.train.run import PointRun
from race_sweeps.train.trainer import lora


class Clock(TrainerCallback):  # type: ignore[misc]
    """Stops after some steps; the first generation warms up and is not timed."""

    def __init__(self, steps: int, warmup: int) -> None:
        self.steps, self.warmup = steps, warmup
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())
        control.should_training_stop |= state.global_step >= self.steps + self.warmup

    @property
    def seconds_per_step(self) -> float:
        return (self.ends[-1] - self.ends[self.warmup - 1]) / (len(self.ends) - self.warmup)


def settings(old_logprobs: str) -> RunConfig:
    overrides = ["model=tiny-m", "update_fraction=a100", "budget.flops=1e13", "eval.problems=8",
                 f"train.old_logprobs={old_logprobs}", "train.checkpoint_seconds=1e6"]  # fmt: skip
    ((_, config),) = compose_points(overrides, multirun=False).points
    return config


def steps_per_generation(config: RunConfig) -> int:
    return config.train.prompts * config.train.group // config.train.minibatch


def ours(config: RunConfig, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_folder = RunFolder(Path(folder) / "point")
        write_atomic(run_folder.config, configuration.save(config))
        run = PointRun(config, run_folder)
        clock = Clock(steps, steps_per_generation(config))
        run.extra_callbacks.append(clock)
        run.train()
        return clock.seconds_per_step


def plain(config: RunConfig, steps: int) -> float:
    train = config.train
    location = models.prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(location, padding_side="left")
    problems = data.load(config, chat=False).train
    reward = rewards.make(config)
    clock = Clock(steps, steps_per_generation(config))

    def correct(completions: list[str], question: list[str], answer: list[str], **_: Any) -> list[float]:
        n = len(completions)
        return reward(rewards.Batch(question, answer, completions, [0] * n, [False] * n)).values

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=train.minibatch,
                steps_per_generation=steps_per_generation(config),
                gradient_accumulation_steps=1,
                num_generations=train.group,
                max_completion_length=config.rollout.max_completion,
                learning_rate=train.learning_rate,
                lr_scheduler_type="constant",
                adam_beta2=train.adam_beta2,
                loss_type=train.loss,
                top_k=0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                max_steps=10**6,
                seed=config.seed,
            ),
            reward_funcs=correct,
            train_dataset=Dataset.from_list(problems),
            processing_class=tokenizer,
            peft_config=lora(config),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return clock.seconds_per_step


def main(blocks: int = 5, steps: int = 80) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"plain": [], "trainer": [], "sampler": []}
    for _ in range(blocks):
        seconds["plain"].append(plain(settings("trainer"), steps))
        for old in ("trainer", "sampler"):
            seconds[old].append(ours(settings(old), steps))
    base = statistics.median(seconds["plain"])
    print(f"plain TRL: {base * 1000:.1f} ms a step (median of {blocks} blocks of {steps} steps)")
    for old in ("trainer", "sampler"):
        ratios = [a / b for a, b in zip(seconds[old], seconds["plain"], strict=True)]
        print(
            f"ours, old log-probs from the {old}: {statistics.median(seconds[old]) * 1000:.1f} ms a step; ratio to "
            f"plain TRL {statistics.median(ratios):.3f} (blocks: {', '.join(f'{r:.3f}' for r in ratios)})"
        )


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
