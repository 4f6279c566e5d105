"""Peak memory of one grid point, estimated from its sizes, so that one that cannot fit is refused before it starts.

Three things are resident (weights, the adapter with its gradients and Adam's two moments, a reserve); on top comes the
larger of two peaks that never coincide: a training microbatch and a generation batch. A vLLM engine on the same device
has weights and a key-value cache of its own, resident too, or in the generation's peak where it sleeps between phases.

What a layer saves for backward was read off torch's saved tensors (fused attention with a padding mask, LoRA applied
unmerged, TRL's fused head); a test holds the estimate against the allocator's measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from race_sweeps.config import DEVICES, VLLM_RANKS, RunConfig
from race_sweeps.errors import UserError
from race_sweeps.flops import ModelShape, PolicyFlops

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}
FLOAT = 4  # adapter, its gradients, Adam's moments, norms and sampling are float32
RESERVE = 2 * GIB  # CUDA context, kernels' workspaces, the allocator's fragmentation
HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768  # tile of TRL's fused head, allocated whatever the vocabulary
VLLM_TOKENS = 16384  # one scheduler step of vLLM at most, on devices of 70 GiB and more (engine/arg_utils.py, 0.31)
VLLM_GRAPHS = 2 * GIB  # captured CUDA graphs and their pools
SAMPLING_COPIES = 5  # of the last position's logits: float32, scaled, log-probs, probabilities, and those held over


@dataclass(frozen=True)
class Memory:
    """Bytes. `training` and `generation` are peaks above what is resident; only the larger counts. `engine`: what a
    vLLM engine keeps while the trainer works."""

    weights: int
    adapter: int
    training: int
    generation: int
    reward: int = 0
    reserve: int = RESERVE
    engine: int = 0

    @property
    def resident(self) -> int:
        """What is there all the time."""
        return self.weights + self.adapter + self.reward + self.reserve + self.engine

    @property
    def total(self) -> int:
        return self.resident + max(self.training, self.generation)


def estimate(config: RunConfig, policy: PolicyFlops, scorers: Iterable[tuple[ModelShape, str]] = ()) -> Memory:
    """Memory of one process that trains and samples this point on one device; sequences are taken at their longest.
    `scorers`: shape and dtype of the process reward models beside the policy."""
    element = BYTES[config.model.dtype]
    prompt, completion = config.rollout.expected_prompt, config.rollout.max_completion
    batch = max(config.rollout.batch, config.eval.batch)
    generation, engine = _generation(policy.shape, batch, prompt, completion, element), 0
    if config.rollout.engine == "vllm":
        engine, generation = _vllm(config, policy, element)
    return Memory(
        weights=policy.shape.parameters * element,
        adapter=4 * FLOAT * policy.trainable,
        training=_training(
            policy, config.train.microbatch, prompt + completion, element, config.train.gradient_checkpointing
        ),
        generation=generation,
        engine=engine,
        reward=sum(shape.parameters * BYTES[dtype] for shape, dtype in scorers),
    )


def refuse_if_too_large(config: RunConfig, memory: Memory) -> None:
    """Raise `UserError` when the point does not fit the device its plan assumes (`plan.device`)."""
    if config.plan.device is None:
        return
    room = DEVICES[config.plan.device].memory * GIB
    if memory.total <= room:
        return
    setting = ""
    if config.rollout.engine == "vllm" and not config.rollout.vllm.sleep:
        setting = "rollout.vllm.sleep=true, "
    if memory.training >= memory.generation:
        setting += f"train.microbatch below {config.train.microbatch}"
        if not config.train.gradient_checkpointing:
            setting += ", train.gradient_checkpointing=true"
    elif config.rollout.engine == "vllm":
        setting += (
            f"rollout.vllm.kv_cache below {config.rollout.vllm.kv_cache:g}, a larger rollout.vllm.tensor_parallel"
        )
    else:
        setting = f"rollout.batch below {config.rollout.batch} (and eval.batch below {config.eval.batch})"
    parts = ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in vars(memory).items() if name != "reserve" and size > GIB // 20
    )
    raise UserError(
        f"model {config.model.name}: needs about {memory.total / GIB:.0f} GiB of memory and {config.plan.device} has "
        f"{DEVICES[config.plan.device].memory:.0f} (GiB: {parts}); what would work: {setting}, or another plan.device"
    )


def _layer_saved(policy: PolicyFlops, length: int, element: int) -> int:
    """Bytes per token that all layers together save for the backward."""
    shape = policy.shape
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    total = 0
    for module, layers in shape.modules:
        saved = 0
        if module.name in policy.targets:  # its input, once per module where it is cast, and what lies between A and B
            shared = element == FLOAT and module.name in ("k_proj", "v_proj", "up_proj")
            saved += (0 if shared else module.inputs) + policy.rank
        if module.role == "up":
            saved += module.outputs * module.used  # the activation's input
        elif module.role == "down":
            saved += module.inputs * module.used  # and its output
        total += layers * saved * element
    norms = max(layer.norms // shape.hidden for layer in shape.layers) or 2
    attention = 3 * q  # queries, keys and values, repeated for every query head
    attention += q if element < FLOAT else 0  # the output, in its own layout
    normed = (q + kv) * FLOAT if any(layer.norms % shape.hidden for layer in shape.layers) else 0
    per_layer = norms * shape.hidden * FLOAT + normed + (attention + length) * element  # the mask has a row per token
    return total + len(shape.layers) * per_layer


def _training(policy: PolicyFlops, rows: int, length: int, element: int, checkpointing: bool) -> int:
    shape, tokens = policy.shape, rows * length
    head = min(tokens, HEAD_TOKENS) * HEAD_COLUMNS * element + tokens * shape.hidden * (FLOAT + 2 * element)
    saved = tokens * _layer_saved(policy, length, element)
    # of the layer whose backward runs: gradients of the MLP's inner activations and of the residual stream
    inner = max(m.inputs * m.used for layer in shape.layers for m in layer.modules if m.role == "down")
    gradients = tokens * (2 * inner + shape.hidden) * FLOAT
    if not checkpointing:
        return saved + max(head, gradients)
    inputs = tokens * shape.hidden * element * len(shape.layers)
    return inputs + max(head, saved // len(shape.layers) + gradients)


def _vllm(config: RunConfig, policy: PolicyFlops, element: int) -> tuple[int, int]:
    """What the engine keeps while the trainer works, and its peak beyond that while it samples, on one of its devices:
    its weights, the adapter at the rank of its kernels, the cache as configured, one step's activations and logits."""
    settings, shape = config.rollout.vllm, policy.shape
    parts = settings.tensor_parallel
    rank = min(r for r in VLLM_RANKS if r >= policy.rank)
    held = (shape.parameters + shape.lora_parameters(rank, policy.targets)) * element // parts
    held += round(settings.kv_cache * GIB)
    widest = max(sum(m.outputs * m.used for m in layer.modules if m.role == "up") for layer in shape.layers)
    queries = shape.heads * shape.head_dim
    working = VLLM_TOKENS * ((2 * widest + 2 * queries) * element // parts + 3 * shape.hidden * element)
    working += settings.sequences * shape.vocab * (element + SAMPLING_COPIES * FLOAT)
    working += 0 if settings.eager else VLLM_GRAPHS
    return (0, held + working) if settings.sleep else (held, working)


def _generation(shape: ModelShape, rows: int, prompt: int, completion: int, element: int) -> int:
    kept = [min(prompt + completion, layer.window or prompt + completion) for layer in shape.layers]
    cell = 2 * shape.kv_heads * shape.head_dim * element  # one token's key and value in one layer
    cache = rows * cell * (sum(kept) + max(kept))  # growing a layer's cache copies it
    logits = rows * shape.vocab * (element + SAMPLING_COPIES * FLOAT)
    widest = max(sum(m.outputs * m.used for m in layer.modules if m.role == "up") for layer in shape.layers)
    queries = shape.heads * shape.head_dim
    prefill = rows * prompt * (2 * (widest + queries) * element + 3 * shape.hidden * FLOAT)
    return max(cache + logits, rows * cell * prompt * len(shape.layers) + prefill + logits)
