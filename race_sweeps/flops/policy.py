"""FLOPs of a policy (frozen backbone + LoRA adapter) in search and learning. Integers throughout; no torch.

Derivation: design notes in docs/ACCOUNTING.md. One multiply-add = 2 FLOPs; embedding look-ups, norms, activations,
softmax, rotary embedding, sampling and the optimizer count 0. Two conventions:

- *model*: what the mathematics needs: real tokens, causal attention, no recomputation;
- *executed*: what the program runs: padding, full-square attention, recomputation.

A third, *paper*, is the parameter-token estimate behind published figures, kept for comparison only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class PolicyFlops:
    """Counts for one policy. `rank` and `targets` describe the LoRA adapter, applied unmerged; rank 0 without targets
    is full fine-tuning (`PolicyFlops.full`).

    Lengths are tokens: `prompt` P, `completion` T >= 1, end-of-sequence token included.
    """

    shape: ModelShape
    rank: int
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        for module in self.targets:
            if module not in self.shape.adaptable:
                raise UserError(
                    f"lora.targets: {module!r} in {self.shape.architecture}; {choices(module, self.shape.adaptable)}"
                )
        if self.rank < bool(self.targets) or (self.rank and not self.targets):
            raise UserError(f"lora.rank={self.rank} with {len(self.targets)} targets: both must be at least 1")

    @staticmethod
    def full(shape: ModelShape) -> PolicyFlops:
        """Every parameter trained, no adapter."""
        return PolicyFlops(shape, 0, ())

    @property
    def _full(self) -> bool:
        return not self.targets

    @cached_property
    def adapter(self) -> int:
        """R summed over the layers: LoRA multiply-adds per token, and LoRA parameters."""
        return self.shape.lora_parameters(self.rank, self.targets)

    @property
    def trainable(self) -> int:
        """Trainable parameters."""
        return self.shape.parameters if self._full else self.adapter

    def _head(self, scored: int) -> int:
        return 2 * self.shape.head * scored

    def _linear(self, adapter: bool) -> int:
        return 2 * (self.shape.linear + (self.adapter if adapter else 0))

    def forward(self, start: int, end: int, scored: int, *, adapter: bool = True) -> int:
        """F(n0, n, s, delta): forward over positions start+1..end, logits at `scored` of them."""
        attention = self.shape.attention * self.shape.pairs(start, end)
        return self._linear(adapter) * (end - start) + attention + self._head(scored)

    def backward(self, length: int, scored: int) -> int:
        """B: frozen modules cost their input gradient, LoRA both gradients of both factors, attention twice its
        forward, the head its input gradient. Full fine-tuning adds the weight gradients of modules and head."""
        gradients = 2 if self._full else 1
        linear = 2 * gradients * self.shape.linear + 4 * self.adapter
        attention = 2 * self.shape.attention * self.shape.pairs(0, length)
        return linear * length + attention + gradients * self._head(scored)

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
        completion ends, attention over every cached position of the padded row (sliding layers keep a window)."""
        rows, p, t = len(prompts), max(prompts), max(completions)
        attended = len(self.shape.layers) * p * p + self.shape.pairs(p, p + t - 1)
        return rows * (self._linear(True) * (p + t - 1) + self.shape.attention * attended + self._head(t))

    def score_executed(
        self, rows: int, prompt: int, completion: int, *, adapter: bool = True, scored: int | None = None
    ) -> int:
        """A forward of `rows` rows padded to `prompt` + `completion` tokens: full-square attention. `scored`: positions
        of all rows whose logits are computed; TRL's fused head computes all but each row's last, except on a Triton
        device, where it picks the completions' real tokens."""
        length = prompt + completion
        body = self._linear(adapter) * length + self.shape.attention * len(self.shape.layers) * length**2
        return rows * body + self._head(rows * (length - 1) if scored is None else scored)

    def train_executed(
        self, rows: int, prompt: int, completion: int, *, checkpointing: bool = False, scored: int | None = None
    ) -> int:
        """Forward and backward of a padded microbatch; `scored` as in `score_executed`. The fused head computes its
        logits again in the backward; gradient checkpointing runs every layer again. Without it, autograd skips what
        lies below the first adapter; with it, the embeddings are made to ask for gradients and nothing is skipped."""
        s, length = self.shape, prompt + completion
        forward = self.score_executed(rows, prompt, completion, scored=scored)
        head = self._head(rows * (length - 1) if scored is None else scored)
        linear, products = self._autograd_all if checkpointing else self._autograd
        backward = rows * (linear * length + products * s.attention // 2 * length**2)
        backward += head * (3 if self._full else 2)
        if checkpointing:
            backward += forward - head - rows * length * self._not_run_again
        return forward + backward

    @cached_property
    def _autograd(self) -> tuple[int, int]:
        return self._gradients(inputs=self._full)

    @cached_property
    def _autograd_all(self) -> tuple[int, int]:
        return self._gradients(inputs=True)

    def _gradients(self, inputs: bool) -> tuple[int, int]:
        """What autograd runs backward through the layers: linear FLOPs per token, and attention products (each a / 2
        per pair; a layer has 4). A product is skipped when nothing before it needs a gradient; `inputs`: whether the
        first layer's input does."""
        linear = products = 0
        flows = inputs  # whether the residual stream carries a gradient
        for layer in self.shape.layers:
            into_mlp = flows
            operands = set("qkv") if flows else set()
            inside = False  # whether a trained module lies between the MLP's input and its `down`
            for m in layer.modules:
                adapted = m.name in self.targets
                trained = adapted or self._full
                if m.role == "o":
                    needed = bool(operands)
                    products += len(operands) + bool(operands & {"q", "k"})  # dV, dQ, dK, and dP that leads to these
                elif m.role in ("up", "down"):
                    needed = into_mlp or (inside and m.role == "down")
                else:
                    needed = into_mlp
                linear += 2 * m.linear * (needed + self._full)
                linear += adapted * self.rank * (4 * m.outputs + (4 if needed else 2) * m.inputs)
                if m.role in ("o", "down"):
                    flows = flows or needed or trained
                    into_mlp = into_mlp if layer.parallel else flows
                    inside = False
                elif m.role == "up":
                    inside = inside or trained
                elif needed or trained:
                    operands |= set(m.role)
        return linear, products

    @cached_property
    def _not_run_again(self) -> int:
        """FLOPs per token that checkpointing's second forward leaves out: it stops once everything the backward reads
        is there, so a layer's last product (the adapter's, if its last module has one) is not run."""
        last = [layer.modules[-1] for layer in self.shape.layers if layer.bare_end]
        return sum(2 * m.outputs * (self.rank if m.name in self.targets else m.inputs) for m in last)

    # --- paper convention ----------------------------------------------------------------------------------------

    def paper_search(self, tokens: int, reward_parameters: int = 0) -> int:
        """2 (N + R) T for T prompt and completion tokens."""
        return 2 * (self.shape.parameters + reward_parameters) * tokens

    def paper_learning(self, tokens: int) -> int:
        """6 N (a + (1 - a) f) T with a = 0.85 and f = trainable / backbone parameters, rounded to an integer."""
        return ((51 * self.shape.parameters + 9 * self.trainable) * tokens + 5) // 10
