"""Rollout engines: sample completions from the policy, with the log-probs of the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
    """How to sample. `temperature` 0 is greedy. `batch`: completions at a time, for engines that pad."""

    max_completion: int
    batch: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Engine(Protocol):
    """Samples from the policy as it is now."""

    def sample(self, model: Any, prompts: Sequence[Any], sampling: Sampling, seed: int) -> Rollouts:
        """One completion per entry of `prompts` (texts or conversations; repeat a prompt, in sequence, for a group).
        `model`: the PEFT policy being trained; an engine that keeps its own weights takes the adapter from it. The
        same seed gives the same completions, whatever was drawn before."""

    def decode(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of completions, special tokens left out."""

    def close(self) -> None:
        """Free what the engine holds."""
