"""FLOPs of a reward model: the forward of its backbone over its own tokens, and its own head instead of a language
head. A generative judge is a policy that only searches: use `PolicyFlops.search` with its sizes."""

from __future__ import annotations

from dataclasses import dataclass

from race_sweeps.errors import UserError
from race_sweeps.flops.policy import Flops, PolicyFlops
from race_sweeps.flops.shape import ModelShape


@dataclass(frozen=True)
class RewardFlops:
    """Counts for one reward model. A plain language model used as a reward (log-probs of an answer) keeps its head."""

    shape: ModelShape

    def score(self, tokens: int, positions: int = 1) -> int:
        """Model FLOPs of one text of `tokens` (its template and separators included), read off at `positions` of
        them: the last token of a classifier, the separators of a process reward model."""
        if not 1 <= positions <= tokens:
            raise UserError(f"reward model: {positions} scored positions in {tokens} tokens: at least 1, at most all")
        return PolicyFlops.full(self.shape).forward(0, tokens, positions)

    def score_executed(self, rows: int, length: int) -> int:
        """A forward of `rows` texts padded to `length`; the head runs at every position."""
        return PolicyFlops.full(self.shape).score_executed(rows, length, 0, scored=rows * length)

    def scores(self, lengths: list[int], positions: list[int] | None = None, paper_tokens: int | None = None) -> Flops:
        """All three conventions of one padded batch. `paper_tokens`: prompt and completion tokens of the policy, which
        is what the paper convention multiplies (default: the reward model's own)."""
        counts = positions or [1] * len(lengths)
        return Flops(
            model=sum(self.score(n, p) for n, p in zip(lengths, counts, strict=True)),
            executed=self.score_executed(len(lengths), max(lengths)),
            paper=2 * self.shape.parameters * (sum(lengths) if paper_tokens is None else paper_tokens),
        )
