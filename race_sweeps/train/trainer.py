"""TRL's GRPO trainer with its compute allocated and accounted.

Two hooks are enough. `rollout_func` samples with our engine and keeps the sampler's log-probs; `_prepare_inputs`, where
TRL decides between generating and reusing, asks the allocator how many groups to generate and how many completions to
train on, and hands out microbatches until they are used up. Loss, advantages, optimizer and checkpoints are TRL's.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import DataLoader, IterableDataset
from trl import GRPOConfig, GRPOTrainer

from race_sweeps.allocate import Allocator, minibatches, select, split
from race_sweeps.config import RunConfig
from race_sweeps.data import Problem, PromptStream
from race_sweeps.flops import Flops, PolicyFlops
from race_sweeps.flops.callback import compact_head
from race_sweeps.folder import RunFolder
from race_sweeps.ledger import Row, Tokens
from race_sweeps.rewards import Batch, Reward, Scores
from race_sweeps.rollouts import Engine, Rollouts, Sampling

MAX_STEPS = 2**31 - 1  # the budget ends a run, not a step count


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward and backward; `weight` makes uneven microbatches of a step average over its rows."""

    rows: list[int]
    weight: float


@dataclass(frozen=True)
class Generation:
    """What the current generation was, for metrics and for people to read."""

    index: int
    problems: list[Problem]
    completions: list[str]
    rewards: list[float]
    advantages: list[float]
    trained: list[int]  # passes over each completion
    scores: Scores


class _Endless(IterableDataset[dict[str, Any]]):
    """The training loop wants something to iterate over; prompts are drawn per generation instead, because how many
    optimizer steps a generation feeds is only known once it is there."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {}


def grpo_arguments(config: RunConfig, folder: RunFolder) -> GRPOConfig:
    """TRL's arguments for this run. Accumulation is the microbatches of one optimizer step."""
    train, cuda = config.train, torch.cuda.is_available()
    accumulation = train.minibatch // train.microbatch
    return GRPOConfig(
        output_dir=str(folder.checkpoints),
        per_device_train_batch_size=train.microbatch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=train.group,
        max_completion_length=config.rollout.max_completion,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        learning_rate=train.learning_rate,
        lr_scheduler_type="constant_with_warmup" if train.warmup_steps else "constant",
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        adam_beta2=train.adam_beta2,
        max_grad_norm=train.max_grad_norm,
        beta=train.beta,
        epsilon=train.epsilon,
        loss_type=train.loss,
        scale_rewards=train.scale_rewards,
        gradient_checkpointing=train.gradient_checkpointing,
        seed=config.seed,
        max_steps=MAX_STEPS,
        bf16=cuda and config.model.dtype == "bfloat16",
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        ignore_data_skip=True,
        logging_steps=1,
        save_strategy="no",
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )


class AllocatedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO that spends its budget as `allocator` says. `record(*rows)` receives the ledger rows of search and reward
    when they were done; learning is told through `step_work` at the end of each optimizer step."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        model: Any,
        tokenizer: Any,
        problems: list[Problem],
        reward: Reward,
        engine: Engine,
        policy: PolicyFlops,
        allocator: Allocator,
        record: Callable[..., None],
        callbacks: list[Any],
    ) -> None:
        self.run, self.reward_system, self.engine = config, reward, engine
        self.policy, self.allocator, self.record = policy, allocator, record
        self.problems = problems
        self.prompts = PromptStream(len(problems), config.seed)
        self.generation: Generation | None = None
        self.work_seconds = 0.0  # spent in search and reward since the run began
        self._microbatches: deque[dict[str, Any]] = deque()
        self._steps: deque[tuple[Flops, Tokens, int]] = deque()
        self._rollouts: Rollouts | None = None
        self._scores: Scores | None = None
        self._phase_seconds = {"search": 0.0, "reward": 0.0}
        super().__init__(
            model=model,
            args=grpo_arguments(config, folder),
            reward_funcs=[self._score],
            train_dataset=Dataset.from_list(problems),
            processing_class=tokenizer,
            peft_config=None if hasattr(model, "peft_config") else lora(config),
            rollout_func=self._rollout,
            callbacks=callbacks,
        )

    # --- what TRL calls --------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Endless(), batch_size=None)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """No model card in every checkpoint."""

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self._microbatches:
            self._generate_next()
        return self._microbatches.popleft()

    def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        started = time.perf_counter()
        rollout = self.run.rollout
        sampling = Sampling(rollout.max_completion, rollout.batch, rollout.temperature, rollout.top_p, rollout.top_k)
        seed = zlib.crc32(f"rollout {self.run.seed} {self.allocator.generations}".encode())
        self._rollouts = self.engine.sample(self.model, prompts, sampling, seed)
        self._phase_seconds["search"] = time.perf_counter() - started
        return {
            "prompt_ids": self._rollouts.prompt_ids,
            "completion_ids": self._rollouts.completion_ids,
            "logprobs": self._rollouts.logprobs,
        }

    def _score(self, completions: list[Any], question: list[str], answer: list[str], **_: Any) -> list[float]:
        started = time.perf_counter()
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        rollouts = self._rollouts
        assert rollouts is not None
        tokens = [len(p) + len(t) for p, t in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)]
        self._scores = self.reward_system(Batch(question, answer, texts, tokens, rollouts.truncated))
        self._texts = texts
        self._phase_seconds["reward"] = time.perf_counter() - started
        return self._scores.values

    def _get_per_token_logps_and_entropies(self, *args: Any, **settings: Any) -> Any:
        scored = super()._get_per_token_logps_and_entropies(*args, **settings)
        self._latest_logprobs = scored[0].detach()
        return scored

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        if inputs["unchanged"]:  # the policy that sampled: what was just scored should be what the sampler said
            self._mismatch(self._latest_logprobs, inputs["sampling_per_token_logps"], inputs["completion_mask"])
        return loss

    # --- one generation and the optimizer steps it feeds -----------------------------------------------------------

    @property
    def between_generations(self) -> bool:
        """Whether every completion generated so far was used: the moment to evaluate, checkpoint or stop."""
        return not self._microbatches

    def step_work(self) -> tuple[Flops, Tokens, int]:
        """Learning FLOPs, tokens and rows of the optimizer step that just ended."""
        return self._steps.popleft()

    def _generate_next(self) -> None:
        allocator, group = self.allocator, self.run.train.group
        step, index = self.state.global_step + 1, self.allocator.generations
        first = allocator.spent.rows["search"] // group
        chosen = [self.problems[self.prompts[first + i]] for i in range(allocator.next_groups())]
        rows = [dict(problem) for problem in chosen for _ in range(group)]
        batch = self._generate_and_score_completions(rows)
        rollouts, scores = self._rollouts, self._scores
        assert rollouts is not None
        assert scores is not None
        prompts = [len(ids) for ids in rollouts.prompt_ids]
        completions = [len(ids) for ids in rollouts.completion_ids]
        self._record_rollouts(step, rollouts, scores, prompts, completions)

        train = _each(self.policy.train, prompts, completions)
        old = [0] * len(train)
        if self.run.train.old_logprobs == "trainer":
            old = _each(self.policy.score, prompts, completions)
        reference = 0
        if self.run.train.beta > 0:  # TRL scores every completion under the frozen backbone
            reference = sum(_each(partial(self.policy.score, adapter=False), prompts, completions))
        passes = allocator.row_passes(train, old, reference)
        rng = random.Random(f"keep {self.run.seed} {index}")
        order = select(passes, scores.values, group, self.run.update_fraction.keep, rng, index)
        kept = sorted(set(order))
        extra = Flops(sum(old[i] for i in kept) + reference, self._extra_executed(batch, kept, completions))
        extra = extra.plus(Flops(paper=self.policy.paper_learning(sum(prompts) + sum(completions))))
        advantages = batch["advantages"].tolist()
        self._old_logprobs(batch, kept)
        self._queue_steps(batch, order, prompts, completions, train, extra)
        self.generation = Generation(
            index=index,
            problems=rows,
            completions=self._texts,
            rewards=scores.values,
            advantages=advantages,
            trained=[order.count(i) for i in range(len(rows))],
            scores=scores,
        )

    def _record_rollouts(
        self, step: int, rollouts: Rollouts, scores: Scores, prompts: list[int], completions: list[int]
    ) -> None:
        tokens = sum(prompts) + sum(completions)
        search = Flops(
            model=sum(_each(self.policy.search, prompts, completions, rollouts.cached)),
            executed=rollouts.executed,
            paper=self.policy.paper_search(tokens),
        )
        cached, modelled = sum(rollouts.cached), rollouts.modelled
        sampled = Tokens(sum(prompts), sum(completions), cached=cached, modelled=modelled)
        seconds = self._phase_seconds
        self.record(
            Row(step, "search", search, sampled, len(prompts), seconds["search"]),
            Row(step, "reward", scores.flops, scores.tokens, len(prompts), seconds["reward"]),
        )
        self.work_seconds += seconds["search"] + seconds["reward"]

    def _old_logprobs(self, batch: dict[str, Any], kept: list[int]) -> None:
        """The denominators of the importance ratio: the sampler's log-probs, or a forward over the kept completions.
        The latter, with an engine that has its own idea of the policy's log-probs, is the policy's ratio alone; that
        the samples are the engine's is then corrected by a weight per token, capped at `rollout.importance_cap`
        (truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training"). It multiplies the advantages, which scales each token's loss as TRL's own correction does."""
        sampled = batch["sampling_per_token_logps"]
        if self.run.train.old_logprobs == "sampler":
            batch["old_per_token_logps"] = sampled
            return
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            scored, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids[kept], mask[kept], batch["completion_ids"].size(1), batch_size=self.run.train.microbatch
            )
        old = torch.zeros_like(sampled)
        old[kept] = scored
        batch["old_per_token_logps"] = old
        self._mismatch(scored, sampled[kept], batch["completion_mask"][kept])
        cap = self.run.rollout.importance_cap
        if self.run.rollout.engine == "vllm" and cap is not None:
            weights = torch.ones_like(sampled)
            weights[kept] = torch.exp(scored - sampled[kept]).clamp(max=cap)
            batch["advantages"] = batch["advantages"][:, None] * weights

    def _mismatch(self, trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> None:
        """How far the sampler's log-probs are from the trainer's for the same policy and tokens: the log-ratio's mean
        (its expectation is minus the KL divergence) and largest size, and the importance weights' extremes and
        effective sample size, as a share of the tokens."""
        ratio = (trainer - sampler)[mask.bool()].float()
        weights = ratio.exp()
        share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
        values = {"log_ratio_mean": ratio.mean(), "log_ratio_max": ratio.abs().max(), "weight_min": weights.min(),
                  "weight_max": weights.max(), "effective_share": share}  # fmt: skip
        for name, value in values.items():
            self._metrics["train"][f"sampler/{name}"].append(value.item())

    def _extra_executed(self, batch: dict[str, Any], kept: list[int], completions: list[int]) -> int:
        prompt, completion = batch["prompt_ids"].size(1), batch["completion_ids"].size(1)
        every = list(range(len(completions)))
        forwards = ((kept, True, self.run.train.old_logprobs == "trainer"), (every, False, self.run.train.beta > 0))
        return sum(
            self.policy.score_executed(
                len(rows), prompt, completion, adapter=adapter, scored=self._scored(completions, rows)
            )
            for rows, adapter, done in forwards
            if done
        )

    def _scored(self, completions: list[int], rows: list[int]) -> int | None:
        """Positions TRL's fused head computes for these rows: their completions' tokens, or (None) every position."""
        return sum(completions[i] for i in rows) if compact_head(self.accelerator.device) else None

    def _queue_steps(
        self,
        batch: dict[str, Any],
        order: list[int],
        prompts: list[int],
        completions: list[int],
        train: list[int],
        extra: Flops,
    ) -> None:
        """Queue the optimizer steps of one generation; `extra` is charged to the first."""
        config = self.run.train
        accumulation = config.minibatch // config.microbatch
        unchanged = config.old_logprobs == "sampler"  # and the first step: the policy is the one that sampled
        for step_rows in minibatches(order, config.minibatch):
            executed = 0
            for rows in split(step_rows, accumulation):
                # A step of fewer rows than microbatches: accumulation still needs one, so repeat a row at weight 0.
                part = Microbatch(rows or step_rows[:1], len(rows) * accumulation / len(step_rows))
                self._microbatches.append({**_take(batch, part), "unchanged": unchanged})
                p, t = max(prompts[i] for i in part.rows), max(completions[i] for i in part.rows)
                executed += self.policy.train_executed(
                    len(part.rows), p, t,
                    checkpointing=config.gradient_checkpointing, scored=self._scored(completions, part.rows),
                )  # fmt: skip
            flops = extra.plus(Flops(sum(train[i] for i in step_rows), executed))
            tokens = Tokens(trained=sum(prompts[i] + completions[i] for i in step_rows))
            self._steps.append((flops, tokens, len(step_rows)))
            extra, unchanged = Flops(), False


def _each(count: Callable[..., int], *lengths: Sequence[int]) -> list[int]:
    """`count` of each completion's lengths, worked out once per distinct ones."""
    rows = list(zip(*lengths, strict=True))
    known = {row: count(*row) for row in set(rows)}
    return [known[row] for row in rows]


def lora(config: RunConfig) -> LoraConfig:
    """The adapter: no dropout, so that sampling and training see the same policy."""
    return LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        target_modules=list(config.lora.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _take(batch: dict[str, Any], part: Microbatch) -> dict[str, Any]:
    """The part's rows of a generation, cut to their own longest prompt (left-padded) and completion."""
    rows = {
        key: value[part.rows]
        for key, value in batch.items()
        if torch.is_tensor(value) and value.dim() > 0
    }  # fmt: skip
    prompt = int(rows["prompt_mask"].sum(1).max())
    completion = int(rows["completion_mask"].sum(1).max())
    for key in ("prompt_ids", "prompt_mask"):
        rows[key] = rows[key][:, -prompt:]
    for key in ("completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps",
                "sampling_per_token_logps", "advantages"):  # fmt: skip
        if key in rows and rows[key].dim() == 2:
            rows[key] = rows[key][:, :completion]
    rows["advantages"] = rows["advantages"] * part.weight
    return {**rows, "num_items_in_batch": batch["num_items_in_batch"]}
