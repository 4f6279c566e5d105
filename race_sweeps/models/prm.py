"""Process reward models of the Qwen2.5-Math-PRM architecture, without the remote code its checkpoints come with.

A Qwen2 backbone and a two-layer head in place of the language head, read at the separator after each step; names of the
weights are `model.*`, `score.0.*` and `score.2.*` (source: the checkpoints' `modeling_qwen2_rm.py`).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2Model, Qwen2PreTrainedModel

from race_sweeps.config import ScorerConfig
from race_sweeps.errors import UserError

SEPARATOR = "<extra_0>"
POSITIVE = 1
"""The class whose probability is a step's score."""


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):  # type: ignore[misc]
    """Two class logits at every position; class `POSITIVE`: the step that ends there is right."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.score = torch.nn.Sequential(
            torch.nn.Linear(config.hidden_size, config.hidden_size),
            torch.nn.ReLU(),
            torch.nn.Linear(config.hidden_size, config.num_labels),
        )
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (batch, length, 2) of token ids (batch, length), padded on the right: causal attention hides the
        padding, so no mask is needed."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.score(hidden)
        return logits

    @torch.no_grad()
    def probabilities(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Probability (batch, length) of the positive class at every position, in float32."""
        logits: torch.Tensor = self(input_ids)
        return logits.float().softmax(-1)[..., POSITIVE]


def location(scorer: ScorerConfig) -> str:
    """What `from_pretrained` takes for this scorer; builds the embedded ones on first use."""
    if scorer.source == "ladder":
        from race_sweeps.models import tiny_prm

        return str(tiny_prm.build(str(scorer.name)))
    if scorer.path is None:
        raise UserError(f"scorer {scorer.name}: no weights; set its path=<a Hub id or a folder>")
    return scorer.path


def load(scorer: ScorerConfig) -> tuple[Qwen2ForProcessRewardModel, Any, str]:
    """Model (on the GPU if there is one), tokenizer and identity: the weights' digest, or their revision on the Hub.
    A reward and a judge that are the same model share it."""
    return _load(str(scorer.name), location(scorer), scorer.dtype)


@lru_cache(maxsize=2)
def _load(name: str, where: str, dtype: str) -> tuple[Qwen2ForProcessRewardModel, Any, str]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model, info = Qwen2ForProcessRewardModel.from_pretrained(
            where, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"scorer {name}: {where} cannot be loaded ({str(error).splitlines()[0]})") from None
    if missing := sorted({*info["missing_keys"], *(str(key) for key, *_ in info["mismatched_keys"])}):
        raise UserError(
            f"scorer {name}: {where} lacks {', '.join(missing[:3])}; give a model of the Qwen2.5-Math-PRM architecture"
        )
    if len(tokenizer.encode(SEPARATOR, add_special_tokens=False)) != 1:
        raise UserError(f"scorer {name}: its tokenizer has no {SEPARATOR}; give the tokenizer it was trained with")
    revision = getattr(model.config, "_commit_hash", None) or _digest(Path(where))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval().requires_grad_(False), tokenizer, f"{name}@{revision[:12]}"


def _digest(folder: Path) -> str:
    """SHA-256 over the weight files of a folder, in the order of their names."""
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as weights:
            total.update(hashlib.file_digest(weights, "sha256").digest())
    return total.hexdigest()
