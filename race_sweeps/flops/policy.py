"""FLOPs of a policy (frozen backbone + LoRA adapter) in search and learning. Integers throughout; no torch.

Derivation: design notes in docs/ACCOUNTING.md. One multiply-add = 2 FLOPs; embedding look-ups, norms, activations,
softmax, rotary embedding, sampling and the optimizer count 0. Two conventions:

- *model*: what the mathematics needs: real tokens, causal attention, no recomputation;
- *executed*: what the program runs: padding, full-square attention, recomputed head products.

A third, *paper*, is the parameter-token estimate behind published figures, kept for comparison only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from race_sweeps.errors import UserError, choices
from race_sweeps.flops.shape import ModelShape


class Flops(NamedTuple):
    """The same work under the three conventions."""

    model: int = 0
    executed: int = 0
    paper: int = 0

    def plus(self, other: Flops) -> Flops:
        return Flops(self.model + other.model, self.executed + other.executed, self.paper + other.paper)


def pairs(start: int, end: int) -> int:
    """pi(start, end): causal (query, key) pairs of the positions start+1..end."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True)
class PolicyFlops:
    """Counts for one policy. `rank` and `targets` describe the LoRA adapter, applied unmerged.

    Lengths are tokens: `prompt` P, `completion` T >= 1, end-of-sequence token included.
    """

    shape: ModelShape
    rank: int
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        for module in self.targets:
            if module not in self.shape.modules:
                raise UserError(f"lora.targets: {module!r}; {choices(module, self.shape.modules)}")
        if self.rank < 1:
            raise UserError(f"lora.rank={self.rank}: must be at least 1")

    @property
    def adapter(self) -> int:
        """R: LoRA multiply-adds per token and layer."""
        return self.shape.lora_parameters(self.rank, self.targets)

    @property
    def trainable(self) -> int:
        """Trainable parameters."""
        return self.shape.layers * self.adapter

    def _head(self, scored: int) -> int:
        return 2 * self.shape.vocab * self.shape.hidden * scored

    def forward(self, start: int, end: int, scored: int, *, adapter: bool = True) -> int:
        """F(n0, n, s, delta): forward over positions start+1..end, logits at `scored` of them."""
        s = self.shape
        linear = s.linear + (self.adapter if adapter else 0)
        return s.layers * (2 * linear * (end - start) + s.attention * pairs(start, end)) + self._head(scored)

    def backward(self, length: int, scored: int) -> int:
        """B: frozen modules cost their input gradient, LoRA both gradients of both factors, attention twice its
        forward, the head its input gradient."""
        s = self.shape
        linear = 2 * s.linear + 4 * self.adapter
        return s.layers * (linear * length + 2 * s.attention * pairs(0, length)) + self._head(scored)

    # --- model convention, one sequence -------------------------------------------------------------------------

    def search(self, prompt: int, completion: int, cached: int = 0) -> int:
        """One completion: prefill gives its first token, its last token is never fed back; `cached` prompt tokens
        came from a prefix cache."""
        self._check(prompt, completion, cached)
        return self.forward(cached, prompt + completion - 1, completion)

    def train(self, prompt: int, completion: int) -> int:
        """One optimisation pass (forward and backward) over one completion and its prompt."""
        self._check(prompt, completion)
        return self.score(prompt, completion) + self.backward(prompt + completion, completion)

    def score(self, prompt: int, completion: int, *, adapter: bool = True) -> int:
        """One forward for log-probs: the trainer's old log-probs, or the reference's (`adapter=False`)."""
        self._check(prompt, completion)
        return self.forward(0, prompt + completion, completion, adapter=adapter)

    @staticmethod
    def _check(prompt: int, completion: int, cached: int = 0) -> None:
        if prompt < 1 or completion < 1 or not 0 <= cached < prompt:
            raise UserError(
                f"lengths prompt={prompt}, completion={completion}, cached={cached}: prompt and completion must be at "
                "least 1 token, and cached between 0 and prompt - 1"
            )

    # --- executed convention, one padded batch -------------------------------------------------------------------

    def search_executed(self, prompts: Sequence[int], completions: Sequence[int]) -> int:
        """`generate` of one batch with a KV cache: prompts padded to the longest, decoding until the longest
        completion ends, attention over every cached position of the padded row."""
        s, rows = self.shape, len(prompts)
        p, t = max(prompts), max(completions)
        attended = p * p + pairs(p, p + t - 1)
        linear = 2 * (s.linear + self.adapter) * (p + t - 1)
        return rows * (s.layers * (linear + s.attention * attended) + self._head(t))

    def score_executed(self, rows: int, prompt: int, completion: int, *, adapter: bool = True) -> int:
        """A forward of `rows` rows padded to `prompt` + `completion` tokens: full-square attention; TRL's fused head
        without Triton computes every position but the last."""
        s, length = self.shape, prompt + completion
        linear = 2 * (s.linear + (self.adapter if adapter else 0))
        return rows * (s.layers * (linear * length + s.attention * length**2) + self._head(length - 1))

    def train_executed(self, rows: int, prompt: int, completion: int, *, checkpointing: bool = False) -> int:
        """Forward and backward of a padded microbatch. The fused head recomputes its logits in the backward; autograd
        skips the input gradients below the first adapter (first layer's q, k, v)."""
        s, length = self.shape, prompt + completion
        forward = self.score_executed(rows, prompt, completion)
        linear = 2 * s.linear + 4 * self.adapter
        backward = rows * (s.layers * (linear * length + 2 * s.attention * length**2) + 2 * self._head(length - 1))
        if not checkpointing:
            backward -= rows * length * self._first_layer_skipped()
        else:
            backward += forward - rows * self._head(length - 1)
        return forward + backward

    def _first_layer_skipped(self) -> int:
        """FLOPs per token autograd never runs: no input gradient is needed for modules fed by the embeddings."""
        fed = {m: self.shape.modules[m] for m in ("q_proj", "k_proj", "v_proj")}
        frozen = sum(2 * i * o for i, o in fed.values())
        return frozen + sum(2 * self.rank * i for m, (i, _) in fed.items() if m in self.targets)

    # --- paper convention ----------------------------------------------------------------------------------------

    def paper_search(self, tokens: int, reward_parameters: int = 0) -> int:
        """2 (N + R) T for T prompt and completion tokens."""
        return 2 * (self.shape.parameters + reward_parameters) * tokens

    def paper_learning(self, tokens: int) -> int:
        """6 N (a + (1 - a) f) T with a = 0.85 and f = trainable / backbone parameters, rounded to an integer."""
        return round((51 * self.shape.parameters + 9 * self.trainable) * tokens / 10)
