"""The sizes of a decoder-only transformer that its compute depends on, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError, choices

# Architectures whose decoder layer is q, k, v, o, gate, up, down with full causal attention. Anything else is refused
# rather than counted wrongly.
ARCHITECTURES = ("qwen2", "qwen3", "llama")
# Biases are carried by the parameter counts but not by the FLOPs: an addition per output against i_m multiply-adds.
QKV_BIAS = ("qwen2",)
QK_NORM = ("qwen3",)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; all counts, no units. `head_dim` is the config's own where it has one (Qwen3: not h/H)."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Input and output size (i_m, o_m) of each linear module of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, f = self.hidden, self.ffn
        return {
            "q_proj": (h, q),
            "k_proj": (h, kv),
            "v_proj": (h, kv),
            "o_proj": (q, h),
            "gate_proj": (h, f),
            "up_proj": (h, f),
            "down_proj": (f, h),
        }

    @property
    def linear(self) -> int:
        """Lambda: multiply-adds per token and layer in the linear modules."""
        return sum(i * o for i, o in self.modules.values())

    @property
    def attention(self) -> int:
        """a = 4 H d: FLOPs per (query, key) pair and layer, scores and weighted values together."""
        return 4 * self.heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, embeddings, norms and biases included (checked against published counts)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.linear + 2 * self.hidden
        layer += (q + 2 * kv) * (self.architecture in QKV_BIAS)
        layer += 2 * self.head_dim * (self.architecture in QK_NORM)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def lora_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """R = sum of r (i_m + o_m) over the adapted modules: LoRA parameters, and multiply-adds per token, a layer."""
        return rank * sum(sum(self.modules[m]) for m in targets)

    @staticmethod
    def from_config(config: Mapping[str, Any], where: str) -> ModelShape:
        """Read the sizes from the fields of a `config.json`. `where` names it in errors (`UserError`)."""
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"{where}: model_type={architecture!r} is not an architecture whose compute can be counted yet; "
                f"{choices(str(architecture), ARCHITECTURES)}"
            )
        if config.get("use_sliding_window"):
            raise UserError(f"{where}: use_sliding_window=true is not counted yet; use a model with full attention")

        def size(field: str, default: int | None = None) -> int:
            value = config.get(field, default)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{where}: {field}={value!r} must be a positive integer")
            return value

        heads = size("num_attention_heads")
        head_dim = config.get("head_dim")
        return ModelShape(
            architecture=architecture,
            hidden=size("hidden_size"),
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim") if head_dim is not None else size("hidden_size") // heads,
            ffn=size("intermediate_size"),
            vocab=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @staticmethod
    def from_path(path: Path) -> ModelShape:
        """Read `config.json` at `path`, or in the folder `path`."""
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}; give a model folder with a config.json") from None
        except ValueError as error:
            raise UserError(f"{file}: not JSON ({error})") from None
        return ModelShape.from_config(config, str(file))
