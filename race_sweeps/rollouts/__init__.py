"""Rollout engines: sample completions from the policy, with the log-probs of the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rollouts:
    """One entry per completion; `completion_ids` end with a stop token unless `truncated` by the length limit.

    `logprobs`: of each sampled token under the sampled (temperature-scaled) distribution. `cached`: prompt tokens
    served from a prefix cache. `executed`: FLOPs the engine ran (executed convention).
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    truncated: list[bool]
    logprobs: list[list[float]]
    cached: list[int]
    executed: int


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy."""

    max_completion: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
