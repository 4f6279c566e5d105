"""Rewards: what a completion is worth to GRPO, with what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from race_sweeps import answers
from race_sweeps.config import RunConfig
from race_sweeps.flops import Flops

NO_FLOPS = Flops()


@dataclass(frozen=True)
class Scores:
    """One value per completion, named components of it, and what scoring cost (rules: 0 FLOPs)."""

    values: list[float]
    components: dict[str, list[float]] = field(default_factory=dict)
    flops: Flops = NO_FLOPS


class Reward(Protocol):
    """A reward system. `questions`, `references` and `completions` are parallel, one entry per completion."""

    @property
    def name(self) -> str: ...

    def __call__(self, questions: Sequence[str], references: Sequence[str], completions: Sequence[str]) -> Scores: ...


@dataclass(frozen=True)
class Sparse:
    """1 when the final answer equals the reference, else 0."""

    extract: str
    name: str = "sparse"

    def __call__(self, questions: Sequence[str], references: Sequence[str], completions: Sequence[str]) -> Scores:
        pairs = zip(completions, references, strict=True)
        values = [float(answers.correct(completion, answer, self.extract)) for completion, answer in pairs]
        return Scores(values, {"correct": values})


def make(config: RunConfig) -> Reward:
    """The reward system of a run."""
    return Sparse(config.data.extract)
