"""Evaluation of a policy on held-out problems: pass@1 with its standard error, native reward, lengths."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from typing import Any

from race_sweeps.config import EvalConfig, RunConfig
from race_sweeps.data import Problem
from race_sweeps.flops import Flops, PolicyFlops
from race_sweeps.ledger import Tokens
from race_sweeps.rewards import Batch, Reward, Sparse
from race_sweeps.rollouts import Engine, Sampling


@dataclass(frozen=True)
class Evaluation:
    """Scores of one evaluation set and what it cost. `metrics` goes into `evals.jsonl` as it is."""

    metrics: dict[str, Any]
    flops: Flops
    tokens: Tokens
    completions: int
    seconds: float


def evaluate(
    model: Any,
    engine: Engine,
    reward: Reward,
    policy: PolicyFlops,
    problems: list[Problem],
    config: RunConfig,
) -> Evaluation:
    """Sample `config.eval.samples` completions of each problem and score them.

    The random stream is the same for every policy and every rung, so comparisons share their sampling noise.
    """
    started = time.perf_counter()
    settings: EvalConfig = config.eval
    rows = [problem for problem in problems for _ in range(settings.samples)]
    by_length = sorted(range(len(rows)), key=lambda i: len(str(rows[i]["prompt"])))  # less padding
    sampling = Sampling(config.rollout.max_completion, settings.batch, settings.temperature)
    rollouts = engine.sample(model, [rows[i]["prompt"] for i in by_length], sampling, zlib.crc32(b"evaluation"))
    prompts = [len(ids) for ids in rollouts.prompt_ids]
    lengths = [len(ids) for ids in rollouts.completion_ids]
    batch = Batch(
        questions=[rows[i]["question"] for i in by_length],
        references=[rows[i]["answer"] for i in by_length],
        completions=engine.decode(rollouts.completion_ids),
        tokens=[p + t for p, t in zip(prompts, lengths, strict=True)],
        truncated=rollouts.truncated,
    )
    native = reward(batch)
    correct = Sparse(config.data.extract)(batch).values
    rates = [0.0] * len(problems)
    for i, value in zip(by_length, correct, strict=True):
        rates[i // settings.samples] += value / settings.samples
    mean = sum(rates) / len(rates)
    variance = sum((r - mean) ** 2 for r in rates) / max(1, len(rates) - 1)
    return Evaluation(
        metrics={
            "set": "heldout",
            "problems": len(problems),
            "samples": settings.samples,
            "temperature": settings.temperature,
            "pass@1": mean,
            "pass@1_se": math.sqrt(variance / len(rates)),
            "native_reward": sum(native.values) / len(rows),
            "truncated": sum(rollouts.truncated) / len(rows),
            "mean_length": sum(lengths) / len(rows),
        },
        flops=Flops(
            model=sum(policy.search(p, t) for p, t in zip(prompts, lengths, strict=True)) + native.flops.model,
            executed=rollouts.executed + native.flops.executed,
            paper=policy.paper_search(sum(prompts) + sum(lengths)) + native.flops.paper,
        ),
        tokens=Tokens(prompt=sum(prompts), completion=sum(lengths)),
        completions=len(rows),
        seconds=time.perf_counter() - started,
    )
