"""The sizes of a decoder-only transformer that its compute depends on, read from a Hugging Face `config.json`.

A layer is a list of linear modules and an attention window. `FAMILIES` says how each architecture lays its layers out;
anything it does not name is refused rather than counted wrongly. Module names are those of the architecture's own code,
because LoRA targets name them. Values a config leaves out take the architecture's defaults in transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError, choices

LARGEST = 10_000_000  # no size of a transformer is larger; a config that says so is damaged
Config = Mapping[str, Any]


def pairs(start: int, end: int, window: int | None = None) -> int:
    """pi(start, end): (query, key) pairs of the positions start+1..end under causal attention, where a query sees the
    last `window` positions, its own included (all when None)."""
    if window is None:
        return (end * (end + 1) - start * (start + 1)) // 2
    low, high = min(start, window), min(end, window)
    return pairs(low, high) + window * ((end - high) - (start - low))


@dataclass(frozen=True)
class Module:
    """One linear map. A token passes `used` of the `stored` copies of it (experts; 1 of 1 elsewhere).

    `role`: `q`, `k`, `v` or `qkv` feed attention, `o` leaves it, `up` enters the MLP and `down` leaves it. Biases are
    parameters but no FLOPs: an addition per output, against `inputs` multiply-adds.
    """

    name: str
    role: str
    inputs: int
    outputs: int
    bias: bool = False
    adaptable: bool = True
    stored: int = 1
    used: int = 1

    @property
    def linear(self) -> int:
        """Multiply-adds per token."""
        return self.inputs * self.outputs * self.used

    @property
    def parameters(self) -> int:
        return (self.inputs * self.outputs + self.outputs * self.bias) * self.stored


@dataclass(frozen=True)
class Layer:
    """Modules in the order of the forward pass; `window`: positions a query attends to (None: all before it).

    `parallel`: the MLP reads the layer's input, not attention's output. `bare_end`: nothing that autograd saves follows
    the last module, so gradient checkpointing does not run it a second time.
    """

    modules: tuple[Module, ...]
    window: int | None
    norms: int
    parallel: bool = False
    bare_end: bool = True

    @cached_property
    def parameters(self) -> int:
        return sum(m.parameters for m in self.modules) + self.norms


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; all counts, no units. `head_dim` is the config's own where it has one (Qwen3: not h/H).

    `score`: (inputs, outputs, bias) of the linear maps that stand in for the language head of a reward model.
    """

    architecture: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    final_norm: int
    layers: tuple[Layer, ...]
    score: tuple[tuple[int, int, bool], ...] = ()

    @cached_property
    def linear(self) -> int:
        """Lambda summed over the layers: multiply-adds per token in their linear modules."""
        return sum(m.linear * n for m, n in self.modules)

    @cached_property
    def modules(self) -> tuple[tuple[Module, int], ...]:
        """Every distinct module and how many layers have it."""
        return tuple(Counter(m for layer in self.layers for m in layer.modules).items())

    @cached_property
    def adaptable(self) -> tuple[str, ...]:
        """Names LoRA can target: what "all-linear" means for this architecture."""
        return tuple(dict.fromkeys(m.name for m, _ in self.modules if m.adaptable))

    @property
    def attention(self) -> int:
        """a = 4 H d: FLOPs per (query, key) pair and layer, scores and weighted values together."""
        return 4 * self.heads * self.head_dim

    @cached_property
    def windows(self) -> tuple[tuple[int | None, int], ...]:
        """Every distinct attention window and how many layers have it."""
        return tuple(Counter(layer.window for layer in self.layers).items())

    def pairs(self, start: int, end: int) -> int:
        """(query, key) pairs of the positions start+1..end, summed over the layers."""
        return sum(count * pairs(start, end, window) for window, count in self.windows)

    @cached_property
    def head(self) -> int:
        """Multiply-adds per scored position: V h of the language head, or those of the reward head."""
        return sum(i * o for i, o, _ in self.score) if self.score else self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model, embeddings, norms and biases included (checked against published counts)."""
        embeddings = self.vocab * self.hidden
        if self.score:
            embeddings += sum(i * o + o * bias for i, o, bias in self.score)
        elif not self.tied:
            embeddings *= 2
        return sum(layer.parameters for layer in self.layers) + embeddings + self.final_norm

    def lora_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """R summed over the layers, r (i_m + o_m) for each adapted module: LoRA parameters, and multiply-adds per
        token."""
        named = set(targets)
        return rank * sum(n * (m.inputs + m.outputs) for m, n in self.modules if m.adaptable and m.name in named)

    @staticmethod
    def from_config(config: Config, where: str) -> ModelShape:
        """Read the sizes from the fields of a `config.json`. `where` names it in errors (`UserError`)."""
        name = config.get("model_type")
        if name not in FAMILIES:
            raise UserError(
                f"{where}: model_type={name!r} is not an architecture whose compute can be counted; "
                f"{choices(str(name), FAMILIES)}"
            )
        return _read(json.dumps(dict(config), sort_keys=True, default=str), where)

    @staticmethod
    def from_path(path: Path) -> ModelShape:
        """Read `config.json` at `path`, or in the folder `path`."""
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}; give a model folder with a config.json") from None
        except ValueError as error:
            raise UserError(f"{file}: not JSON ({error}); give a model folder with a config.json") from None
        if not isinstance(config, dict):
            raise UserError(f"{file}: not a JSON object; give a model folder with a config.json")
        return ModelShape.from_config(config, str(file))


# --- how architectures lay out their layers ---------------------------------------------------------------------------

SPLIT = (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "o"))
GATED = (("gate_proj", 1), ("up_proj", 1))


@dataclass(frozen=True)
class Family:
    """What distinguishes one architecture from Llama's layer.

    `attention`: (module, role). `up`, `down`: the MLP's modules; `up` with the multiple of the MLP's width it has.
    `norms`, `final_norm`: vectors of hidden size a layer and the model's end hold. `qk_norm`: what a norm of queries
    and keys spans, one `head` or `all`. `*_bias`: whether the modules have one: fixed, or a config field and its
    default. `slides`: which layers attend to a window only.
    """

    attention: tuple[tuple[str, str], ...] = SPLIT
    up: tuple[tuple[str, int], ...] = GATED
    down: str = "down_proj"
    norms: int = 2
    final_norm: int = 1
    qk_norm: str | None = None
    qkv_bias: tuple[str, bool] | bool = ("attention_bias", False)
    o_bias: tuple[str, bool] | bool = ("attention_bias", False)
    mlp_bias: tuple[str, bool] | bool = False
    slides: Callable[[Config, int], bool] | None = None
    window: int | None = None
    head_dim: int | None = None
    kv_heads: str = "required"  # in a config; "optional": as many as heads when not given; "none": no such field
    tied: bool = False
    parallel: bool = False
    post_norm: bool = False
    sparse: bool = False  # mixture of experts
    expert_width: str = "moe_intermediate_size"


def _listed(config: Config, index: int) -> bool | None:
    """What the config's own `layer_types` say, if it has them."""
    types = config.get("layer_types")
    return types[index] == "sliding_attention" if types else None


def _every(config: Config, index: int) -> bool:
    return True


def _if_used(config: Config, index: int) -> bool:
    return bool(config.get("use_sliding_window"))


def _late(config: Config, index: int) -> bool:
    listed = _listed(config, index)
    return _if_used(config, index) and (index >= config.get("max_window_layers", 28) if listed is None else listed)


def _early_even(config: Config, index: int) -> bool:
    listed = _listed(config, index)
    even = index % 2 == 0 and index < config.get("max_window_layers", 28)
    return _if_used(config, index) and (even if listed is None else listed)


def _two_of_two(config: Config, index: int) -> bool:
    listed = _listed(config, index)
    return index % 2 == 0 if listed is None else listed


def _five_of_six(config: Config, index: int) -> bool:
    listed = _listed(config, index)
    return (index + 1) % config.get("sliding_window_pattern", 6) != 0 if listed is None else listed


FAMILIES = {
    "llama": Family(mlp_bias=("mlp_bias", False), kv_heads="optional"),
    "qwen2": Family(qkv_bias=True, o_bias=False, slides=_late, window=4096),
    "qwen3": Family(qk_norm="head", slides=_late, window=4096, head_dim=128),
    "mistral": Family(qkv_bias=False, o_bias=False, slides=_every, window=4096),
    "gemma2": Family(norms=4, slides=_two_of_two, window=4096, head_dim=256, tied=True, post_norm=True),
    "gemma3_text": Family(
        norms=4, qk_norm="head", slides=_five_of_six, window=4096, head_dim=256, tied=True, post_norm=True
    ),
    "phi3": Family(
        attention=(("qkv_proj", "qkv"), ("o_proj", "o")), up=(("gate_up_proj", 2),), qkv_bias=False, o_bias=False,
        slides=_every, kv_heads="optional",
    ),
    "gpt_neox": Family(  # LayerNorms hold a weight and a bias each
        attention=(("query_key_value", "qkv"), ("dense", "o")), up=(("dense_h_to_4h", 1),), down="dense_4h_to_h",
        norms=4, final_norm=2, qkv_bias=("attention_bias", True), o_bias=("attention_bias", True), mlp_bias=True,
        kv_heads="none", parallel=True,
    ),
    "olmo": Family(norms=0, final_norm=0, kv_heads="optional"),
    "olmo2": Family(qk_norm="all", kv_heads="optional", post_norm=True),
    "mixtral": Family(
        qkv_bias=False, o_bias=False, slides=_every, sparse=True, expert_width="intermediate_size"
    ),
    "qwen2_moe": Family(
        qkv_bias=("qkv_bias", True), o_bias=False, slides=_early_even, window=4096, sparse=True
    ),
    "qwen3_moe": Family(qk_norm="head", slides=_if_used, window=4096, sparse=True),
}  # fmt: skip
HEADS: dict[str, Callable[[int, int], tuple[tuple[int, int, bool], ...]]] = {
    "ForCausalLM": lambda h, labels: (),
    "ForSequenceClassification": lambda h, labels: ((h, labels, False),),
    "ForTokenClassification": lambda h, labels: ((h, labels, True),),
    "ForProcessRewardModel": lambda h, labels: ((h, h, True), (h, labels, True)),  # Qwen2.5-Math-PRM's own code
}
_VALID_HEADS = f"valid: classes that end in {', '.join(HEADS)}"


@lru_cache(maxsize=64)
def _read(config: str, where: str) -> ModelShape:
    """Cached: a grid asks for the same few models at every one of its points."""
    fields: dict[str, Any] = json.loads(config)
    return _Reader(fields, where, FAMILIES[fields["model_type"]]).shape()


class _Reader:
    """Reads one config for one family."""

    def __init__(self, config: Config, where: str, family: Family) -> None:
        self.config, self.where, self.family = config, where, family

    def size(self, field: str, default: int | None = None) -> int:
        value = self.config.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise UserError(f"{self.where}: {field}={value!r} must be an integer from 1 to {LARGEST}")
        return value

    def bias(self, rule: tuple[str, bool] | bool) -> bool:
        return rule if isinstance(rule, bool) else bool(self.config.get(*rule))

    def shape(self) -> ModelShape:
        config, family = self.config, self.family
        self.hidden, self.heads = self.size("hidden_size"), self.size("num_attention_heads")
        grouped = family.kv_heads != "none"
        self.kv_heads = self.heads
        if grouped:
            self.kv_heads = self.size("num_key_value_heads", self.heads if family.kv_heads == "optional" else None)
        if grouped and (family.head_dim or config.get("head_dim") is not None):
            self.head_dim = self.size("head_dim", family.head_dim)
        elif self.hidden % self.heads == 0:
            self.head_dim = self.hidden // self.heads
        else:
            raise UserError(f"{self.where}: hidden_size={self.hidden} is no multiple of {self.heads} attention heads")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.where}: num_key_value_heads={self.kv_heads} does not divide {self.heads} heads")
        depth = self.size("num_hidden_layers")
        types = config.get("layer_types")
        if types is not None and (not isinstance(types, list) or len(types) != depth):
            raise UserError(f"{self.where}: layer_types must list {depth} layers, as num_hidden_layers says")
        return ModelShape(
            architecture=config["model_type"],
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            final_norm=family.final_norm * self.hidden,
            layers=tuple(self.layer(index) for index in range(depth)),
            score=self.score(),
        )

    def layer(self, index: int) -> Layer:
        family = self.family
        sparse = family.sparse and self.is_sparse(index)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qk = {"head": 2 * self.head_dim, "all": q + kv, None: 0}[family.qk_norm]
        return Layer(
            modules=(*self.attention(), *(self.experts() if sparse else self.mlp(self.size("intermediate_size")))),
            window=self.window(index),
            norms=family.norms * self.hidden + qk,
            parallel=family.parallel and bool(self.config.get("use_parallel_residual", True)),
            bare_end=not family.post_norm and not sparse,
        )

    def attention(self) -> tuple[Module, ...]:
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        wide = {"q": q, "k": kv, "v": kv}
        qkv_bias, o_bias = self.bias(self.family.qkv_bias), self.bias(self.family.o_bias)
        return tuple(
            Module(name, "o", q, h, o_bias) if role == "o"
            else Module(name, role, h, sum(wide[part] for part in role), qkv_bias)
            for name, role in self.family.attention
        )  # fmt: skip

    def mlp(self, width: int, prefix: str = "", adaptable: bool = True) -> tuple[Module, ...]:
        h, bias = self.hidden, self.bias(self.family.mlp_bias)
        adaptable = adaptable and not self.family.sparse  # PEFT turns these names into expert parameters
        ups = [Module(prefix + name, "up", h, multiple * width, bias, adaptable) for name, multiple in self.family.up]
        return (*ups, Module(prefix + self.family.down, "down", width, h, bias, adaptable))

    def is_sparse(self, index: int) -> bool:
        dense = self.config.get("mlp_only_layers") or []
        return index not in dense and (index + 1) % self.size("decoder_sparse_step", 1) == 0

    def experts(self) -> tuple[Module, ...]:
        """The router, the experts a token uses and, where there is one, the shared expert with its gate."""
        field = "num_local_experts" if "num_local_experts" in self.config else "num_experts"  # older and newer name
        h, stored, used = self.hidden, self.size(field), self.size("num_experts_per_tok")
        if used > stored:
            raise UserError(f"{self.where}: num_experts_per_tok={used} exceeds {field}={stored}")
        width = self.size(self.family.expert_width)
        modules = [
            Module("gate", "up", h, stored, adaptable=False),
            Module("experts.gate_up_proj", "up", h, 2 * width, adaptable=False, stored=stored, used=used),
            Module("experts.down_proj", "down", width, h, adaptable=False, stored=stored, used=used),
        ]
        if self.config.get("shared_expert_intermediate_size") is not None:
            modules += self.mlp(self.size("shared_expert_intermediate_size"), "shared_expert.", adaptable=False)
            modules.append(Module("shared_expert_gate", "up", h, 1, adaptable=False))
        return tuple(modules)

    def window(self, index: int) -> int | None:
        family = self.family
        if family.slides is None or self.config.get("sliding_window", family.window) is None:
            return None
        return self.size("sliding_window", family.window) if family.slides(self.config, index) else None

    def score(self) -> tuple[tuple[int, int, bool], ...]:
        architecture = str((self.config.get("architectures") or ["ForCausalLM"])[0])
        labels = self.config.get("num_labels") or len(self.config.get("id2label") or {}) or 2
        for suffix, head in HEADS.items():
            if architecture.endswith(suffix):
                return head(self.hidden, labels)
        raise UserError(
            f"{self.where}: architectures={architecture!r} has a head that cannot be counted; {_VALID_HEADS}"
        )
