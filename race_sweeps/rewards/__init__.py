"""Rewards: what a completion is worth to GRPO, with what it cost."""

from __future__ import annotations

from typing import Any

from race_sweeps.config import REWARD_WEIGHTS, RunConfig
from race_sweeps.rewards.base import NO_FLOPS, NO_TOKENS, Batch, Reward, Scores
from race_sweeps.rewards.custom import Custom
from race_sweeps.rewards.rules import Dense, DenseVerifier, Rule, Sparse, Structured

__all__ = [
    "NO_FLOPS",
    "NO_TOKENS",
    "Batch",
    "Custom",
    "Dense",
    "DenseVerifier",
    "Reward",
    "Rule",
    "Scores",
    "Sparse",
    "Structured",
    "make",
]


def make(config: RunConfig, model: Any = None, tokenizer: Any = None) -> Reward:
    """The reward system of a run. `model`: the policy (PEFT), `tokenizer`: its own; for rewards that ask the frozen
    base policy."""
    reward = config.reward
    if reward.kind == "custom":
        return Custom(reward.function or "", reward.name)
    if reward.kind in REWARD_WEIGHTS:
        return Rule(
            reward.kind,
            extract=config.data.extract,
            chain=config.data.kind == "chain",
            weights=reward.weights,
            scale=reward.scale,
            seconds=reward.verifier_seconds,
            memory=round(reward.verifier_memory * 2**30),
            name=reward.name,
        )
    raise NotImplementedError(reward.kind)


def judge(config: RunConfig) -> Reward | None:
    """The common judge of a sweep's evaluations; None where the configuration names none."""
    if config.judge.name is None:
        return None
    from race_sweeps.rewards.prm import make_scorer

    return make_scorer(config.judge)  # type: ignore[no-any-return]
