"""Process reward models as rewards and as judges: every step of a solution gets the probability that it is right.

How Qwen2.5-Math-PRM wants its text is documented on its model card: a system prompt, the question, and the solution's
steps (cut at blank lines) with `<extra_0>` after each; a step's score is the softmax probability of the positive class
there. The embedded tiny models read `models/tiny_prm.py`'s format instead, one step a result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from race_sweeps.config import ScorerConfig
from race_sweeps.flops import Flops, ModelShape, RewardFlops
from race_sweeps.ledger import Tokens
from race_sweeps.models import prm, tiny_prm
from race_sweeps.process_labels import first_error
from race_sweeps.rewards import Batch, Scores

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
RIGHT = 0.5
"""A step is labelled right from this score on."""


class Format(Protocol):
    """How a scorer's text is made."""

    def steps(self, completion: str) -> list[str]:
        """The steps of a completion, in order."""

    def token_ids(self, question: str, steps: Sequence[str], ended: bool) -> list[int]:
        """The scorer's input: a separator after each step (after the empty text where there is none). `ended`: the
        completion came to its own end."""


class ChainFormat:
    """The tiny models' format."""

    def steps(self, completion: str) -> list[str]:
        return tiny_prm.text_steps(completion)

    def token_ids(self, question: str, steps: Sequence[str], ended: bool) -> list[int]:
        return tiny_prm.token_ids(question, steps, ended)


class ChatFormat:
    """The format of Qwen2.5-Math-PRM's model card, through the tokenizer's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.separator = tokenizer.convert_tokens_to_ids(prm.SEPARATOR)

    def steps(self, completion: str) -> list[str]:
        return paragraphs(completion)

    def token_ids(self, question: str, steps: Sequence[str], ended: bool) -> list[int]:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question.replace(prm.SEPARATOR, "")},
            {"role": "assistant", "content": prm.SEPARATOR},
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        head, _, tail = text.partition(prm.SEPARATOR)
        ids: list[int] = self._encode(head)
        for step in steps or [""]:
            # What the policy wrote is text: a separator or end mark spelt out in it must not become one.
            ids += [*self._encode(step, split_special_tokens=True), self.separator]
        return ids + self._encode(tail)

    def _encode(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return ids


@dataclass(frozen=True)
class StepScores:
    """`steps[i]`: the scores, 0 to 1, of solution i's steps; a step beyond `max_tokens` is unread and scores 0.
    `truncated`: texts that were longer. `flops` as `RewardFlops` counts them, its paper convention over the scorer's
    own tokens; `tokens`: those read."""

    steps: list[list[float]]
    truncated: int
    flops: Flops
    tokens: int


class StepScorer:
    """A process reward model: a `Reward` by itself (`scorer(batch)`), and `score_steps` for solutions cut already.
    `identity`: name and weights, for the record."""

    def __init__(self, scorer: ScorerConfig) -> None:
        self.config, self.name = scorer, str(scorer.name)
        self.model, tokenizer, self.identity = prm.load(scorer)
        self.format: Format = ChainFormat() if scorer.source == "ladder" else ChatFormat(tokenizer)
        self.separator: int = tokenizer.convert_tokens_to_ids(prm.SEPARATOR)
        self.flops = RewardFlops(ModelShape.from_config(self.model.config.to_dict(), f"scorer {self.name}"))
        self.longest = min(scorer.max_tokens, self.model.config.max_position_embeddings)

    def __call__(self, batch: Batch) -> Scores:
        """The value of each completion: `scalar`, the mean of its step scores; `thought`, the share of its steps
        before the first one labelled wrong (score below `RIGHT`)."""
        solutions = [self.format.steps(text) for text in batch.completions]
        read = self.score_steps(batch.questions, solutions, [not cut for cut in batch.truncated])
        means = [sum(scores) / len(scores) for scores in read.steps]
        prefixes = [right_prefix(scores) for scores in read.steps]
        return Scores(
            values=prefixes if self.config.aggregate == "thought" else means,
            components={"step_mean": means, "right_prefix": prefixes, "steps": [float(len(s)) for s in read.steps]},
            flops=read.flops._replace(paper=2 * self.flops.shape.parameters * sum(batch.tokens)),
            tokens=Tokens(prompt=read.tokens),
            counts={"scorer/truncated": read.truncated},
        )

    def score_steps(
        self, questions: Sequence[str], solutions: Sequence[Sequence[str]], ended: Sequence[bool] | None = None
    ) -> StepScores:
        """Scores of every step of every solution (a solution without steps counts as one empty step)."""
        ended = ended or [True] * len(solutions)
        texts = [
            self.format.token_ids(question, steps, end)
            for question, steps, end in zip(questions, solutions, ended, strict=True)
        ]
        truncated = sum(len(ids) > self.longest for ids in texts)
        texts = [ids[: self.longest] for ids in texts]
        scores = [[0.0] * max(1, len(steps)) for steps in solutions]
        flops, tokens = Flops(), 0
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # less padding
        for start in range(0, len(texts), self.config.batch):
            rows = by_length[start : start + self.config.batch]
            found = self._forward([texts[i] for i in rows])
            lengths = [len(texts[i]) for i in rows]
            for i, row in zip(rows, found, strict=True):
                scores[i][: len(row)] = row
            flops = flops.plus(self.flops.scores(lengths, [max(1, len(row)) for row in found]))
            tokens += sum(lengths)
        return StepScores(scores, truncated, flops, tokens)

    def _forward(self, texts: list[list[int]]) -> list[list[float]]:
        """Scores at the separators of each text, in one padded forward."""
        inputs = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.long)
        for i, ids in enumerate(texts):
            inputs[i, : len(ids)] = torch.tensor(ids)
        at = torch.zeros_like(inputs, dtype=torch.bool)
        for i, ids in enumerate(texts):
            at[i, : len(ids)] = inputs[i, : len(ids)] == self.separator
        probabilities = self.model.probabilities(inputs.to(self.model.device)).cpu()
        return [probabilities[i][at[i]].tolist() for i in range(len(texts))]


def paragraphs(completion: str) -> list[str]:
    """A completion cut at its blank lines."""
    return [part.strip("\n") for part in re.split(r"\n\s*\n", completion) if part.strip()]


def right_prefix(scores: Sequence[float]) -> float:
    """Share of the steps before the first one whose score is below `RIGHT`."""
    wrong = first_error(scores, RIGHT)
    return 1.0 if wrong == -1 else wrong / len(scores)


def make_scorer(scorer: ScorerConfig) -> StepScorer:
    """The process reward model of a `reward.scorer` or `judge` (whose `name` is set): a `Reward` usable alone.

    >>> scorer = make_scorer(ScorerConfig(name="prm-tiny-m", source="ladder", dtype="float32"))  # doctest: +SKIP
    >>> scorer.score_steps(["7+3*8-2="], [["7+3=0", "*8=0", "-2=8"]]).steps  # doctest: +SKIP
    """
    return StepScorer(scorer)
