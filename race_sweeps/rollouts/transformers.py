"""Rollouts with Hugging Face `generate`: a KV cache, no prefix cache (every completion prefills its own prompt)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from race_sweeps.flops import PolicyFlops
from race_sweeps.rollouts import Rollouts, Sampling
from race_sweeps.rollouts.text import Text


class _SampledLogProbs(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log-prob of each sampled token. A processor sees the scores before the token is drawn and the token
    at the next step, so one step's scores (batch, vocabulary) are held, never the whole generation's."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.scores: torch.Tensor | None = None
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.take(input_ids[:, -1])
        self.scores = scores
        return scores

    def take(self, tokens: torch.Tensor) -> None:
        if self.scores is not None:
            scaled = self.scores.float() / self.temperature
            chosen = scaled.gather(1, tokens[:, None])[:, 0]
            self.steps.append(chosen - scaled.logsumexp(dim=-1))


class TransformersEngine(Text):
    """Samples from a model that is already in memory, the LoRA adapter applied unmerged."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, policy: PolicyFlops) -> None:
        super().__init__(tokenizer)
        self.policy = policy

    def check(self, model: Any, prompts: Sequence[Any], max_completion: int) -> None:
        """Raise `UserError` for a prompt that leaves no room for `max_completion` tokens in the model's context."""
        context = getattr(model.config, "max_position_embeddings", None)
        if context is not None:
            self.fit(self.tokenize(prompts), max_completion, context, "a model with a longer context")

    def close(self) -> None:
        """Nothing to free: the model is the trainer's."""

    def sample(self, model: Any, prompts: Sequence[Any], sampling: Sampling, seed: int) -> Rollouts:
        """One completion per entry of `prompts` (repeat a prompt for a group). The same seed gives the same
        completions, whatever was drawn before; the global random state is left untouched."""
        prompt_ids = self.tokenize(prompts)
        completion_ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        executed = 0
        stops = self.stop_tokens(model)
        with _sampling_from(model), _seeded(seed, model.device):
            for start in range(0, len(prompt_ids), sampling.batch):
                ids = prompt_ids[start : start + sampling.batch]
                tokens, scores = self._generate(model, ids, sampling, stops)
                completion_ids += tokens
                logprobs += scores
                executed += self.policy.search_executed([len(p) for p in ids], [len(t) for t in tokens])
        truncated = [ids[-1] not in stops for ids in completion_ids]
        return Rollouts(prompt_ids, completion_ids, truncated, logprobs, [0] * len(prompt_ids), executed)

    def _generate(
        self, model: Any, prompt_ids: list[list[int]], sampling: Sampling, stops: set[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        padded = self.tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt").to(
            model.device
        )
        greedy = sampling.temperature == 0
        warp = {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        recorder = _SampledLogProbs(sampling.temperature or 1.0)
        output = model.generate(
            **padded,
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_completion,
                do_sample=not greedy,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=sorted(stops),
                disable_compile=True,
                **warp,
            ),
            logits_processor=LogitsProcessorList([recorder]),
        )
        recorder.take(output[:, -1])
        tokens = output[:, padded["input_ids"].shape[1] :].tolist()
        scores = torch.stack(recorder.steps, dim=1).tolist()
        lengths = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in tokens]
        return (
            [row[:n] for row, n in zip(tokens, lengths, strict=True)],
            [row[:n] for row, n in zip(scores, lengths, strict=True)],
        )


@contextmanager
def _sampling_from(model: Any) -> Iterator[None]:
    """Evaluation mode, no gradients, no gradient checkpointing (it forbids the KV cache); all restored after."""
    training, checkpointing = model.training, getattr(model, "is_gradient_checkpointing", False)
    if checkpointing:
        model.gradient_checkpointing_disable()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        if checkpointing:
            model.gradient_checkpointing_enable()


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
