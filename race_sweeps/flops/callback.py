"""The compute ledger of any TRL run: two lines in a plain `GRPOTrainer` or `RLOOTrainer` script.

    from race_sweeps.flops.callback import FlopsCallback
    trainer.add_callback(FlopsCallback(trainer))

Everything the policy computes in these trainers passes through two of their methods: `_generate`, and
`_get_per_token_logps_and_entropies`, which scores completions with gradients (training) or without (old log-probs,
reference). Watching these two counts what happens instead of guessing it from the arguments; a reward model is watched
by a hook. The ledger appears in the output folder, sums and rho in the trainer's own logs, and so in W&B.

Not seen: a model that a reward function calls by itself (`charge` it), what a prefix cache saves vLLM (TRL does not
report it), images and tools (refused).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch.nn import Module
from transformers import TrainerCallback

from race_sweeps import ledger
from race_sweeps.errors import UserError
from race_sweeps.flops import Flops, ModelShape, PolicyFlops, RewardFlops
from race_sweeps.ledger import PHASES, LedgerWriter, Row, Tokens

WATCHED = ("_generate", "_get_per_token_logps_and_entropies", "_calculate_rewards")


@dataclass
class _Work:
    """What one phase did since the last row."""

    flops: Flops = field(default_factory=Flops)
    tokens: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("prompt", "completion", "cached", "trained"), 0)
    )
    rows: int = 0
    seconds: float = 0.0

    def add(self, other: _Work) -> None:
        self.flops = self.flops.plus(other.flops)
        self.tokens = {name: count + other.tokens[name] for name, count in self.tokens.items()}
        self.rows += other.rows
        self.seconds += other.seconds


def compact_head(device: Any) -> bool:
    """Whether TRL's fused head computes logits at the scored positions only (where it has Triton), not at all."""
    from trl.trainer import utils

    return bool(utils._use_triton(device))


def policy_of(model: Any) -> PolicyFlops:
    """The accountant of a loaded model, fully trained or with LoRA. Raises `UserError` for what it cannot count."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    shape = ModelShape.from_config(_with_class(base), f"model {type(base).__name__}")
    if base is model:
        return PolicyFlops.full(shape)
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A") and len(m.lora_A)}
    ranks = {rank for m in adapted.values() for rank in m.r.values()}
    if len(ranks) != 1:
        raise UserError(f"adapter of rank {sorted(ranks)}: one LoRA rank for all modules can be counted")
    return PolicyFlops(shape, ranks.pop(), tuple(sorted({name.rpartition(".")[2] for name in adapted})))


class FlopsCallback(TrainerCallback):  # type: ignore[misc]
    """Ledgers the compute of `trainer` (TRL's GRPO or RLOO trainer) in `path`, by default `ledger.jsonl` in its output
    folder. A run resumed from a checkpoint continues its ledger; rows after the checkpoint count as lost."""

    def __init__(self, trainer: Any, path: str | Path | None = None) -> None:
        missing = [name for name in WATCHED if not hasattr(trainer, name)]
        if missing:
            raise UserError(
                f"FlopsCallback: {type(trainer).__name__} has no {missing[0]}; TRL's GRPO and RLOO trainers do"
            )
        if getattr(trainer, "tools", None) or getattr(trainer, "_is_vlm", False):
            raise UserError(
                "FlopsCallback: tools and images are not counted; use it with text-only, single-turn training"
            )
        self.trainer = trainer
        self.path = Path(path) if path else Path(trainer.args.output_dir) / "ledger.jsonl"
        self.policy = policy_of(trainer.model)
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        if trained != self.policy.trainable and not sharded:
            raise UserError(
                f"FlopsCallback: {trained} trainable parameters, not {self.policy.trainable}: plain LoRA on linear "
                "modules or full fine-tuning can be counted, not partly frozen models or other adapters"
            )
        self.lora_layer = next((m for m in trainer.model.modules() if hasattr(m, "lora_A")), None)
        models = [trainer.accelerator.unwrap_model(f) for f in trainer.reward_funcs if isinstance(f, Module)]
        self.rewards = {
            m: RewardFlops(ModelShape.from_config(_with_class(m), f"reward model {type(m).__name__}")) for m in models
        }
        self.work = {phase: _Work() for phase in PHASES}
        self.totals = ledger.Totals()
        self.writer: LedgerWriter | None = None
        self.attempt = 1
        self.generated_tokens = 0
        self._undo: list[Callable[[], Any]] = []

    def charge(self, flops: Flops, seconds: float = 0.0, rows: int = 0) -> None:
        """Add what a reward function of yours computed with a model this callback cannot see."""
        self._add("reward", _Work(flops, rows=rows, seconds=seconds))

    # --- training's events -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = LedgerWriter(self.path, resume_step=state.global_step)
            self.attempt = self.writer.attempt
            self.totals = ledger.read(self.path).totals
        self._watch("_generate", self._generated)
        self._watch("_get_per_token_logps_and_entropies", self._scored)
        self._watch("_calculate_rewards", lambda *_, seconds, **__: self._add("reward", _Work(seconds=seconds)))
        for model in self.rewards:
            self._undo.append(model.register_forward_hook(self._rewarded, with_kwargs=True).remove)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started, self.elsewhere = time.perf_counter(), self._seconds_elsewhere()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        elapsed = time.perf_counter() - self.started - (self._seconds_elsewhere() - self.elsewhere)
        self._add("learning", _Work(seconds=elapsed))
        self._write(state.global_step)
        self._log()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._write(state.global_step + 1)  # an evaluation after the last step

    def _seconds_elsewhere(self) -> float:
        return sum(self.work[phase].seconds for phase in PHASES if phase != "learning")

    # --- what is watched -------------------------------------------------------------------------------------------

    def _watch(self, name: str, then: Callable[..., None]) -> None:
        """Call `then(result, *arguments, seconds=...)` after each call of the trainer's method."""
        original, own = getattr(self.trainer, name), vars(self.trainer).get(name)

        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = original(*args, **kwargs)
            then(result, *args, **kwargs, seconds=time.perf_counter() - started)
            return result

        setattr(self.trainer, name, watched)
        self._undo.append(lambda: setattr(self.trainer, name, own) if own else delattr(self.trainer, name))

    def _training(self) -> bool:
        return bool(self.trainer.model.training)

    def _generated(self, result: Sequence[Any], *_: Any, seconds: float, **__: Any) -> None:
        prompts, completions = ([len(ids) for ids in rows] for rows in result[:2])
        # vLLM samples with the adapter merged into the weights
        model = sum(
            self.policy.forward(0, p + t - 1, t, adapter=not self.trainer.use_vllm)
            for p, t in zip(prompts, completions, strict=True)
        )
        executed = model  # an engine with paged attention runs no padding
        engines = ("use_vllm", "use_transformers_continuous_batching", "rollout_func")
        if not any(getattr(self.trainer, engine, None) for engine in engines):
            multiple = self.trainer.pad_to_multiple_of or 1
            padded = -(-max(prompts) // multiple) * multiple
            executed = self.policy.search_executed([padded] * len(prompts), completions)
        self.generated_tokens = sum(prompts) + sum(completions)
        phase = "search" if self._training() else "eval"
        tokens = {"prompt": sum(prompts), "completion": sum(completions), "cached": 0, "trained": 0}
        flops = Flops(model, executed, self.policy.paper_search(self.generated_tokens))
        self._add(phase, _Work(flops, tokens, len(prompts), seconds))
        if phase == "search":
            self._add("learning", _Work(Flops(paper=self.policy.paper_learning(self.generated_tokens))))

    def _scored(
        self, result: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **__: Any
    ) -> None:
        lengths = attention_mask.sum(1).tolist()
        completions = attention_mask[:, -logits_to_keep:].sum(1).tolist()
        rows, width = input_ids.shape
        scored = sum(completions) if compact_head(input_ids.device) else None
        adapter = not getattr(self.lora_layer, "disable_adapters", False)
        sizes = (rows, width - logits_to_keep, logits_to_keep)
        work = _Work()
        if result[0].requires_grad:
            checkpointing = self.trainer.args.gradient_checkpointing
            executed = self.policy.train_executed(*sizes, checkpointing=checkpointing, scored=scored)
            work.rows, work.tokens["trained"] = rows, sum(lengths)
        else:
            executed = self.policy.score_executed(*sizes, adapter=adapter, scored=scored)
        needed = 0
        for (length, completion), count in Counter(zip(lengths, completions, strict=True)).items():
            needed += count * self.policy.forward(0, length, completion, adapter=adapter)
            needed += count * self.policy.backward(length, completion) if work.rows else 0
        work.flops = Flops(model=needed, executed=executed)
        self._add("learning" if self._training() else "eval", work)

    def _rewarded(self, model: Any, _: Any, inputs: dict[str, Any], output: Any) -> None:
        lengths = inputs["attention_mask"].sum(1).tolist()
        flops = self.rewards[model].scores(lengths, paper_tokens=self.generated_tokens)
        executed = self.rewards[model].score_executed(*inputs["input_ids"].shape)
        self._add("reward" if self._training() else "eval", _Work(flops._replace(executed=executed), rows=len(lengths)))

    def _add(self, phase: str, work: _Work) -> None:
        self.work[phase].add(work)

    # --- ledger and logs -------------------------------------------------------------------------------------------

    def _write(self, step: int) -> None:
        """One row per phase that did something, summed over the processes."""
        shares = gather_object([self.work])
        self.work = {phase: _Work() for phase in PHASES}
        rows = []
        for phase in PHASES:
            total = _Work()
            for share in shares:
                total.add(share[phase])
            seconds = total.seconds / len(shares)
            if total.flops != Flops() or total.rows:
                row = Row(step, phase, total.flops, Tokens(**total.tokens), total.rows, seconds, self.attempt)
                rows.append(row)
                self.totals.add(row)
        if self.writer is not None and rows:
            self.writer.write(rows)

    def _log(self) -> None:
        """Sums so far, where the trainer keeps the metrics of its next log line."""
        spent = self.totals
        values: dict[str, float] = {f"flops/{phase}": spent.model(phase) for phase in PHASES}
        counted = [flops for phase, flops in spent.flops.items() if phase != "eval"]
        values |= {
            "flops/total": spent.total,
            "flops/executed_total": sum(f.executed for f in counted),
            "flops/paper_total": sum(f.paper for f in counted),
            "flops/rho": spent.rho or 0.0,
        }
        for name, value in values.items():
            self.trainer._metrics["train"][name] = [float(value)]


def _with_class(model: Any) -> dict[str, Any]:
    """A model's config, with the class it was loaded as: that decides which head it has."""
    return {**model.config.to_dict(), "architectures": [type(model).__name__], "num_labels": model.config.num_labels}
