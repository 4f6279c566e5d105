"""Rollouts with Hugging Face `generate`: a KV cache, no prefix cache (every completion prefills its own prompt)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from race_sweeps.flops import PolicyFlops
from race_sweeps.rollouts import Rollouts, Sampling


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


class TransformersEngine:
    """Samples from a model that is already in memory, the LoRA adapter applied unmerged."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, policy: PolicyFlops) -> None:
        self.tokenizer, self.policy = tokenizer, policy

    def decode(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of completions, special tokens left out."""
        return list(self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True))

    def close(self) -> None:
        """Nothing to free: the model is the trainer's."""

    def tokenize(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of text prompts, or of conversations through the tokenizer's chat template."""
        if isinstance(prompts[0], str):
            ids = self.tokenizer(text=list(prompts))["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        return [list(row) for row in ids]

    def sample(self, model: Any, prompts: Sequence[Any], sampling: Sampling, seed: int) -> Rollouts:
        """One completion per entry of `prompts` (repeat a prompt for a group). The same seed gives the same
        completions, whatever was drawn before; the global random state is left untouched."""
        prompt_ids = self.tokenize(prompts)
        completion_ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        executed = 0
        stops = self._stop_tokens(model)
        with _sampling_from(model), _seeded(seed, model.device):
            for start in range(0, len(prompt_ids), sampling.batch):
                ids = prompt_ids[start : start + sampling.batch]
                tokens, scores = self._generate(model, ids, sampling, stops)
                completion_ids += tokens
                logprobs += scores
                executed += self.policy.search_executed([len(p) for p in ids], [len(t) for t in tokens])
        truncated = [ids[-1] not in stops for ids in completion_ids]
        return Rollouts(prompt_ids, completion_ids, truncated, logprobs, [0] * len(prompt_ids), executed)

    def _stop_tokens(self, model: Any) -> set[int]:
        """End-of-sequence tokens: the generation config's and the tokenizer's."""
        configured = model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return {token for token in (*listed, self.tokenizer.eos_token_id) if token is not None}

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
