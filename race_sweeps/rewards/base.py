"""What every reward takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from race_sweeps.flops import Flops
from race_sweeps.ledger import Tokens

NO_FLOPS, NO_TOKENS = Flops(), Tokens()


@dataclass(frozen=True)
class Batch:
    """Completions to score; parallel sequences, one entry per completion. `tokens`: the policy's prompt + completion
    tokens of each (what the paper convention multiplies); `truncated`: it was cut off at the length limit."""

    questions: Sequence[str]
    references: Sequence[str]
    completions: Sequence[str]
    tokens: Sequence[int]
    truncated: Sequence[bool]

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class Scores:
    """One value per completion, named components of it, and what scoring cost (rules: 0 FLOPs). `tokens`: those a
    reward model read. `counts`: events of this batch, for example {"verifier/timeouts": 1, "scorer/truncated": 2}."""

    values: list[float]
    components: dict[str, list[float]] = field(default_factory=dict)
    flops: Flops = NO_FLOPS
    tokens: Tokens = NO_TOKENS
    counts: dict[str, int] = field(default_factory=dict)


class Reward(Protocol):
    """A reward system, or a judge: scores a batch of completions."""

    @property
    def name(self) -> str: ...

    def __call__(self, batch: Batch) -> Scores: ...
