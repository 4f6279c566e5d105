"""Tiny models of every architecture, and where the published configurations are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.conftest import shared

SIZES = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
TINY: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-no-gqa": {"model_type": "qwen2", "num_key_value_heads": 4},
    "qwen2-sliding": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 10},
    "llama": {"model_type": "llama"},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 5, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 5, "tie_word_embeddings": True,
        "num_hidden_layers": 7,
    },
    "phi3": {"model_type": "phi3"},
    "phi3-sliding": {"model_type": "phi3", "sliding_window": 6},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt_neox-serial": {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "shared_expert_intermediate_size": 36, "mlp_only_layers": [1], **MOE
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 10, "decoder_sparse_step": 2, **MOE},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The `config.json` fields of a tiny model."""
    return {**SIZES, **TINY[name]}


def eager_tiny(parent: Path) -> Path:
    """A copy, in `parent`, of the tiny policy whose config asks for eager attention, which torch can count."""
    from race_sweeps.models import ladder

    return eager_copy(ladder.build("tiny-s"), parent)


def eager_copy(source: Path, parent: Path) -> Path:
    """A copy of a model folder, in `parent`, whose config asks for eager attention."""
    folder = parent / f"{source.name}-eager"
    if not folder.exists():
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "eager"}))
    return folder


def published(name: str) -> Path:
    """The folder of a published `config.json`; skips the test where the shared data is not at hand."""
    return shared(f"model_configs/{name}")
