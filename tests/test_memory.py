"""The memory estimate against the allocator's own peaks, and what a plan refuses because of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from race_sweeps import memory
from race_sweeps.cli import main
from race_sweeps.config import RunConfig
from race_sweeps.flops import PolicyFlops
from race_sweeps.memory import GIB
from race_sweeps.models import policy_flops

LADDER = ("tiny-s", "tiny-m", "tiny-l")
TOLERANCE = 0.15


def config_of(*overrides: str) -> RunConfig:
    from race_sweeps.compose import compose_points

    return compose_points(["stage=A", "sweep=test", *overrides], multirun=False).points[0][1]


def peak(work: Callable[[], Any]) -> int:
    """Bytes that torch's CPU allocator held at most during `work`, above what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def adapted(name: str, dtype: str) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from race_sweeps.models import ladder

    model = AutoModelForCausalLM.from_pretrained(ladder.build(name), dtype=getattr(torch, dtype))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")).train()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [32768, 64], ids=["head", "layers"])  # the head's tile hides the layers otherwise
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(("name", "dtype"), [*((n, "float32") for n in LADDER), ("tiny-l", "bfloat16")])
def test_a_training_microbatch(
    name: str, dtype: str, checkpointing: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from trl.trainer import utils as trl_utils

    monkeypatch.setattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", columns)
    monkeypatch.setattr(memory, "HEAD_COLUMNS", columns)
    rows, length, prompt = 256, 60, 12
    model = adapted(name, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    ids = torch.arange(rows * length).reshape(rows, length) % 13 + 3
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :prompt] = -100
    mask[0, 0] = 0  # padding: attention gets a mask, as in training
    half = dtype == "bfloat16"

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs.sum()
        loss.backward()

    policy = policy_flops(config_of(f"model={name}"))
    gradients = memory.FLOAT * policy.trainable
    expected = memory._training(policy, rows, length, memory.BYTES[dtype], checkpointing) + gradients
    assert expected == pytest.approx(peak(step), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [128, 1024])
@pytest.mark.parametrize("name", LADDER)
def test_a_generation_batch(name: str, rows: int) -> None:
    from transformers import AutoTokenizer

    from race_sweeps.models import ladder
    from race_sweeps.rollouts import Rollouts, Sampling
    from race_sweeps.rollouts.transformers import TransformersEngine

    policy = policy_flops(config_of(f"model={name}"))
    tokenizer = AutoTokenizer.from_pretrained(ladder.build(name), padding_side="left")
    engine, model = TransformersEngine(tokenizer, policy), adapted(name, "float32")
    sampled: list[Rollouts] = []
    found = peak(lambda: sampled.append(engine.sample(model, ["7+3*8-2+1="] * rows, Sampling(40, rows), 0)))
    longest = max(map(len, sampled[0].completion_ids))
    prompt = len(sampled[0].prompt_ids[0])
    assert memory._generation(policy.shape, rows, prompt, longest, 4) == pytest.approx(found, rel=TOLERANCE)


def test_the_parts_add_up() -> None:
    config = config_of("model=7b")
    policy = policy_flops(config)
    found = memory.estimate(config, policy, [(policy.shape, config.model.dtype)])
    assert found.weights == found.reward == 2 * 7_615_616_512
    assert found.adapter == 16 * policy.trainable
    resident = found.weights + found.adapter + found.reward + found.reserve
    assert found.total == resident + max(found.training, found.generation)
    assert found.engine == 0


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("train.microbatch", 16, "training"),
        ("rollout.batch", 128, "generation"),
        ("rollout.max_completion", 4096, None),
    ],
)
def test_more_at_a_time_needs_more(key: str, value: int, part: str | None) -> None:
    before, after = (
        memory.estimate(config, policy_flops(config))
        for config in (config_of("model=3b"), config_of("model=3b", f"{key}={value}"))
    )
    for name in ("training", "generation"):
        changed = part in (None, name)
        assert (getattr(after, name) > getattr(before, name)) == changed


def test_checkpointing_trades_memory_for_compute() -> None:
    config = config_of("model=3b", "train.gradient_checkpointing=false")
    policy: PolicyFlops = policy_flops(config)
    lighter = replace(config, train=replace(config.train, gradient_checkpointing=True))
    assert memory.estimate(lighter, policy).training < memory.estimate(config, policy).training / 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.gradient_checkpointing=false"], "train.microbatch below 8, train.gradient_checkpointing=true"),
        (["train.microbatch=128", "train.minibatch=512"], "train.microbatch below 128, or another plan.device"),
        (["rollout.batch=2048"], "rollout.batch below 2048"),
    ],
)
def test_a_point_that_cannot_fit_is_refused(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model=7b", *overrides]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "h100-sxm has 79" in message
    assert message.count("\n") == 1
    assert main(["plan", "model=7b", "plan.device=null", *overrides]) == 0  # no device, no limit


def test_the_shipped_models_fit_the_device_they_are_planned_for() -> None:
    for name in ("0.5b", "1.5b", "3b", "7b"):
        config = config_of(f"model={name}")
        needed = memory.estimate(config, policy_flops(config))
        memory.refuse_if_too_large(config, needed)
        assert GIB < needed.total < 40 * GIB


@pytest.mark.parametrize(("model", "rollout"), [("7b", "vllm_7b"), ("3b", "vllm_h100"), ("1.5b", "vllm_h100")])
def test_trainer_and_vllm_engine_fit_one_card_of_80_gb(model: str, rollout: str) -> None:
    """Weights counted on the meta device, from the transformers class, once for each of the two."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = config_of(f"model={model}", f"rollout={rollout}")
    with torch.device("meta"):
        backbone = Qwen2ForCausalLM(Qwen2Config(**config.model.config)).to(torch.bfloat16)
    weights = sum(value.nbytes for value in backbone.parameters())
    needed = memory.estimate(config, policy_flops(config))
    memory.refuse_if_too_large(config, needed)
    assert needed.weights == weights
    cache = config.rollout.vllm.kv_cache * GIB
    engine = needed.generation if config.rollout.vllm.sleep else needed.engine
    assert engine > weights + cache
    assert needed.total < 79.2 * GIB
    both = 2 * weights + cache + needed.adapter  # at least, whoever is at work
    assert needed.total > both if not config.rollout.vllm.sleep else needed.resident < weights + 4 * GIB


def test_an_engine_that_sleeps_leaves_its_memory_to_the_trainer() -> None:
    awake, asleep = (
        memory.estimate(config, policy_flops(config))
        for config in (config_of("model=7b", "rollout=vllm_7b", f"rollout.vllm.sleep={s}") for s in ("false", "true"))
    )
    assert asleep.engine == 0
    assert asleep.training == awake.training
    assert asleep.generation == awake.engine + awake.generation
    assert asleep.total < awake.total


def test_an_engine_that_cannot_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=7b", "rollout=vllm_7b", "rollout.vllm.kv_cache=60"]) == 2
    assert "what would work: rollout.vllm.kv_cache below 60" in capsys.readouterr().err
    assert main(["plan", "model=7b", "rollout=vllm", "rollout.vllm.kv_cache=45"]) == 2
    assert "what would work: rollout.vllm.sleep=true" in capsys.readouterr().err
