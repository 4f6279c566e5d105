"""`prm_proxy`: process rewards without a process reward model. The frozen base policy says how much likelier each step
makes the reference answer.

Step k's gain is g_k = log p(answer | prompt, steps 1..k) - log p(answer | prompt, steps 1..k-1), the answer asked for
by a fixed cue; its score is sigmoid(g_k), 1/2 for a step that tells the model nothing; the reward is the mean over
steps, in (0, 1). Every forward is charged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from race_sweeps.config import RunConfig
from race_sweeps.flops import Flops, ModelShape, PolicyFlops, RewardFlops
from race_sweeps.ledger import Tokens
from race_sweeps.models import tiny_prm
from race_sweeps.rewards import Batch, Scores
from race_sweeps.rewards.prm import paragraphs

CUES = {"math": ("\n\nThe final answer is \\boxed{", "}"), "equals": ("=", "")}
"""By `data.extract`: the text put between a prefix and the answer, and the text that ends the answer."""


@dataclass(frozen=True)
class _Text:
    """Token ids: the prompt, the prefix, the cue and, last, `answer` tokens of the reference."""

    ids: tuple[int, ...]
    answer: int


class Proxy:
    """A reward that asks `model`, any causal language model; its LoRA layers, if it has any, are switched off while it
    is asked. `prompt`: template with {question}."""

    def __init__(
        self, model: Any, tokenizer: Any, *, prompt: str, extract: str, batch: int, max_tokens: int, name: str
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.prompt, (self.cue, self.end) = prompt, CUES[extract]
        self.split = tiny_prm.text_steps if extract == "equals" else paragraphs
        self.batch, self.max_tokens = batch, max_tokens
        self.shape = ModelShape.from_config(model.config.to_dict(), "the proxy's model")

    def __call__(self, batch: Batch) -> Scores:
        """The mean step score of each completion, and its steps' summed gain in nats as the component `gain`. Equal
        texts of a batch are run once (a group shares its prompt); texts longer than `max_tokens` keep their end."""
        prefixes = [self._texts(*row) for row in zip(batch.questions, batch.references, batch.completions, strict=True)]
        distinct = {text: None for texts in prefixes for text in texts}
        known, flops, tokens = self._logprobs(list(distinct))
        values, gains = [], []
        for texts in prefixes:
            levels = [known[text] for text in texts]
            steps = [after - before for before, after in pairwise(levels)]
            values.append(sum(map(_sigmoid, steps)) / len(steps))
            gains.append(levels[-1] - levels[0])
        return Scores(
            values=values,
            components={"gain": gains, "steps": [len(texts) - 1.0 for texts in prefixes]},
            flops=flops._replace(paper=2 * self.shape.parameters * sum(batch.tokens)),
            tokens=Tokens(prompt=tokens),
            counts={"scorer/truncated": sum(len(text.ids) > self.max_tokens for text in distinct)},
        )

    def _texts(self, question: str, reference: str, completion: str) -> list[_Text]:
        """What is asked about one completion: its prompt alone, then with one step more each time (at least one)."""
        steps = self.split(completion) or [""]
        prompt = self._prompt_ids(self.prompt.replace("{question}", question))
        answer = self._encode(reference + self.end)
        texts, at = [], 0
        for step in ["", *steps]:
            at = completion.index(step, at) + len(step)
            ids = [*prompt, *self._encode(completion[:at] + self.cue), *answer]
            texts.append(_Text(tuple(ids), len(answer)))
        return texts

    def _prompt_ids(self, text: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self._encode(text)
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    @torch.no_grad()
    def _logprobs(self, texts: Sequence[_Text]) -> tuple[dict[_Text, float], Flops, int]:
        """log p of each text's answer, with what the forwards cost and the tokens they read."""
        known: dict[_Text, float] = {}
        lengths = {text: min(len(text.ids), self.max_tokens) for text in texts}
        counter, flops = RewardFlops(self.shape), Flops()
        with frozen(self.model):
            by_length = sorted(texts, key=lengths.__getitem__)
            for start in range(0, len(by_length), self.batch):
                rows = by_length[start : start + self.batch]
                width, answer = lengths[rows[-1]], max(text.answer for text in rows)
                inputs = torch.zeros((len(rows), width), dtype=torch.long)
                mask = torch.zeros_like(inputs)
                for i, text in enumerate(rows):  # padded on the left, so that all answers end together
                    inputs[i, width - lengths[text] :] = torch.tensor(text.ids[-lengths[text] :])
                    mask[i, width - lengths[text] :] = 1
                inputs, mask = inputs.to(self.model.device), mask.to(self.model.device)
                logits = self.model(
                    input_ids=inputs,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                    logits_to_keep=answer + 1,
                    use_cache=False,
                ).logits[:, :-1]
                scores = logits.float().log_softmax(-1).gather(2, inputs[:, -answer:, None])[..., 0].cpu()
                for i, text in enumerate(rows):
                    known[text] = float(scores[i, answer - text.answer :].sum())
                flops = flops.plus(
                    Flops(
                        model=sum(counter.score(lengths[text], text.answer) for text in rows),
                        executed=PolicyFlops.full(self.shape).score_executed(
                            len(rows), width, 0, scored=len(rows) * (answer + 1)
                        ),
                    )
                )
        return known, flops, sum(lengths.values())


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """The model without its LoRA layers and in evaluation mode; both come back afterwards."""
    adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    training = model.training
    model.eval()
    for layer in adapters:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapters:
            layer.enable_adapters(True)
        model.train(training)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def make_proxy(config: RunConfig, model: Any, tokenizer: Any) -> Proxy:
    """The proxy of a run: its own base policy; batch and limit as `reward.scorer` has them."""
    return Proxy(
        model,
        tokenizer,
        prompt=config.data.prompt,
        extract=config.data.extract,
        batch=config.reward.scorer.batch,
        max_tokens=config.reward.scorer.max_tokens,
        name=config.reward.name,
    )
