"""Evaluation of a policy on one set of problems: pass@1 and unbiased pass@k with their intervals, native reward, the
common judge's score, lengths; and the outcome of every completion, for paired tests."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from race_sweeps import answers
from race_sweeps.config import RunConfig
from race_sweeps.data import Problem
from race_sweeps.flops import Flops, PolicyFlops
from race_sweeps.ledger import Tokens
from race_sweeps.rewards import Batch, Reward, Scores, Sparse
from race_sweeps.rollouts import Engine, Rollouts, Sampling

LEVEL_95 = 1.959964  # standard normal quantile of a two-sided 95% interval


@dataclass(frozen=True)
class Evaluation:
    """Scores of one evaluation set and what they cost. `metrics` goes into `evals.jsonl` as it is; `outcomes` are
    columns with one entry per completion, in the order of problems and samples."""

    metrics: dict[str, Any]
    outcomes: dict[str, list[Any]]
    flops: Flops
    tokens: Tokens
    completions: int
    seconds: float


def evaluate(
    model: Any,
    engine: Engine,
    reward: Reward,
    judge: Reward | None,
    policy: PolicyFlops,
    name: str,
    problems: list[Problem],
    config: RunConfig,
) -> Evaluation:
    """Sample `config.eval.samples` completions of each problem of the set `name` and score them three ways.

    The random stream is the same for every policy and every rung, so comparisons share their sampling noise.
    """
    started = time.perf_counter()
    settings, samples = config.eval, config.eval.samples
    rows = [problem for problem in problems for _ in range(samples)]
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
    extract = str(problems[0]["extract"])
    correct = Sparse(extract)(batch)
    judged = judge(batch) if judge is not None else None
    place = {row: position for position, row in enumerate(by_length)}

    def in_order(values: Sequence[Any]) -> list[Any]:
        return [values[place[i]] for i in range(len(rows))]

    outcomes: dict[str, list[Any]] = {
        "problem": [i // samples for i in range(len(rows))],
        "sample": [i % samples for i in range(len(rows))],
        "id": [row["id"] for row in rows],
        "completion": in_order(batch.completions),
        "correct": [value > 0 for value in in_order(correct.values)],
        "native": in_order(native.values),
        "truncated": in_order(rollouts.truncated),
        "tokens": in_order(lengths),
    }
    if judged is not None:
        outcomes["judge"] = in_order(judged.values)
    stated = [answers.final(text, extract) is not None for text in batch.completions]
    metrics = {
        "set": name,
        "problems": len(problems),
        "samples": samples,
        "temperature": settings.temperature,
        **pass_rates(outcomes["correct"], samples, settings.pass_at),
        **_mean("native_reward", outcomes["native"], samples),
        **{f"native/{part}": sum(values) / len(rows) for part, values in native.components.items()},
        **(_mean("judge", outcomes["judge"], samples) if judged is not None else {}),
        "judge_identity": getattr(judge, "identity", None),
        "truncated": sum(rollouts.truncated) / len(rows),
        "format": sum(stated) / len(rows),
        "mean_length": sum(lengths) / len(rows),
        **_counts(native, correct, judged),
    }
    return Evaluation(
        metrics=metrics,
        outcomes=outcomes,
        flops=_spent(policy, rollouts, prompts, lengths, native, judged),
        tokens=Tokens(sum(prompts), sum(lengths), cached=sum(rollouts.cached), modelled=rollouts.modelled),
        completions=len(rows),
        seconds=time.perf_counter() - started,
    )


def _spent(
    policy: PolicyFlops,
    rollouts: Rollouts,
    prompts: list[int],
    lengths: list[int],
    native: Scores,
    judged: Scores | None,
) -> Flops:
    """Sampling, the reward system's and the judge's own FLOPs."""
    spent = Flops(
        model=sum(policy.search(p, t, c) for p, t, c in zip(prompts, lengths, rollouts.cached, strict=True)),
        executed=rollouts.executed,
        paper=policy.paper_search(sum(prompts) + sum(lengths)),
    )
    for scores in (native, judged):
        if scores is not None:
            spent = spent.plus(scores.flops)
    return spent


def _counts(*scores: Scores | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for score in scores:
        for event, number in (score.counts if score is not None else {}).items():
            counts[event] = counts.get(event, 0) + number
    return counts


def pass_rates(correct: Sequence[bool], samples: int, ks: Sequence[int]) -> dict[str, Any]:
    """`pass@k`, its standard error and 95% interval for each k: `correct` has `samples` outcomes per problem, in
    sequence.

    The estimator is unbiased: 1 - C(n - c, k) / C(n, k) for c of n samples correct, averaged over problems (Chen et al.
    2021, "Evaluating Large Language Models Trained on Code"). Problems, not samples, are the independent units of the
    standard error (Miller 2024, "Adding Error Bars to Evals").
    """
    rates: dict[str, Any] = {}
    hits = [sum(correct[i : i + samples]) for i in range(0, len(correct), samples)]
    for k in ks:
        each = [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in hits]
        mean, error = _mean_and_error(each)
        rates |= {f"pass@{k}": mean, f"pass@{k}_se": error, f"pass@{k}_ci": interval(mean, error, len(each))}
    return rates


def interval(rate: float, error: float, problems: int) -> list[float]:
    """95% interval of a rate from its standard error over problems: Wilson's, at the number of independent yes-or-no
    trials that would have that error (Korn and Graubard 1998), so it stays within 0 and 1 and does not vanish where
    every problem went the same way."""
    n = rate * (1 - rate) / error**2 if error > 0 else float(problems)
    z2 = LEVEL_95**2 / n
    centre = (rate + z2 / 2) / (1 + z2)
    half = LEVEL_95 / (1 + z2) * math.sqrt(rate * (1 - rate) / n + z2 / n / 4)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def _mean(name: str, values: Sequence[float], samples: int) -> dict[str, float]:
    """Mean over problems of a score and its standard error, samples of a problem averaged first."""
    each = [sum(values[i : i + samples]) / samples for i in range(0, len(values), samples)]
    mean, error = _mean_and_error(each)
    return {name: mean, f"{name}_se": error}


def _mean_and_error(each: Sequence[float]) -> tuple[float, float]:
    mean = sum(each) / len(each)
    variance = sum((value - mean) ** 2 for value in each) / max(1, len(each) - 1)
    return mean, math.sqrt(variance / len(each))
