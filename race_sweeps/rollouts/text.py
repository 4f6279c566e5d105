"""What every engine does with a tokenizer: prompts to ids, ids to text, stop tokens, room in the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from race_sweeps.errors import UserError


class Text:
    """A tokenizer as rollout engines use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def decode(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of completions, special tokens left out."""
        return list(self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True))

    def tokenize(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of text prompts, or of conversations through the tokenizer's chat template."""
        if isinstance(prompts[0], str):
            ids = self.tokenizer(text=list(prompts))["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        return [list(row) for row in ids]

    def stop_tokens(self, model: Any) -> set[int]:
        """End-of-sequence tokens: the generation config's and the tokenizer's."""
        configured = model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return {token for token in (*listed, self.tokenizer.eos_token_id) if token is not None}

    def fit(self, prompt_ids: Sequence[Sequence[int]], max_completion: int, context: int, setting: str) -> None:
        """Raise `UserError` when the longest prompt and a whole completion exceed `context` tokens, which `setting`
        would change."""
        longest = max(prompt_ids, key=len)
        if len(longest) + max_completion > context:
            start = self.tokenizer.decode(longest[:24], skip_special_tokens=True)
            raise UserError(
                f"rollout.max_completion={max_completion}: with a prompt of {len(longest)} tokens ({start!r}...) it "
                f"exceeds the context of {context}; what would work: at most "
                f"rollout.max_completion={max(0, context - len(longest))}, shorter prompts, or {setting}"
            )
