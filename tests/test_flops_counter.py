"""Executed FLOPs equal, to the last one, what torch counts while it runs the same work."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    GenerationConfig,
)
from trl.trainer import utils as trl_utils

from race_sweeps.flops import ModelShape, PolicyFlops, RewardFlops
from tests.flops_cases import TINY, config_of, published
from tests.flops_counting import counted

ROWS, PROMPT, COMPLETION, RANK = 2, 7, 6, 3
LENGTH = PROMPT + COMPLETION


def build(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    model.config._experts_implementation = "eager"
    return model


def policy(config: dict[str, Any], targets: tuple[str, ...] | None = None) -> PolicyFlops:
    """LoRA on `targets` (None: all the architecture allows; empty: full fine-tuning)."""
    shape = ModelShape.from_config(config, "test")
    targets = shape.adaptable if targets is None else targets
    return PolicyFlops(shape, RANK, targets) if targets else PolicyFlops.full(shape)


def adapted(config: dict[str, Any], targets: tuple[str, ...]) -> Any:
    """The model with TRL's fused head and the adapter, as a trainer prepares them."""
    model = build(config)
    trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if targets:
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(targets), task_type="CAUSAL_LM"))
    return model.train()


def batch(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels; only the completion is scored. The rows are as long as the batch: no padding."""
    ids = torch.arange(ROWS * LENGTH, device=device).reshape(ROWS, LENGTH) % 30 + 5
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return ids, labels


def train(model: Any, checkpointing: bool = False) -> int:
    if checkpointing:
        model.gradient_checkpointing_enable()
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()
    ids, labels = batch(str(model.device))
    mask = torch.ones_like(ids)

    def step() -> None:
        model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs.sum().backward()

    return counted(step)


@pytest.mark.parametrize("name", TINY)
def test_forward(name: str) -> None:
    config, (ids, _) = config_of(name), batch()
    model = build(config).eval()
    with torch.no_grad():
        found = counted(lambda: model(ids, attention_mask=torch.ones_like(ids), use_cache=False))
    count = policy(config, ())
    assert found == count.score_executed(ROWS, PROMPT, COMPLETION, scored=ROWS * LENGTH)


@pytest.mark.parametrize("name", TINY)
def test_generation_with_a_cache(name: str) -> None:
    config, (ids, _) = config_of(name), batch()
    count = policy(config)
    model = adapted(config, count.targets).eval()
    setting = GenerationConfig(max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=2)
    with torch.no_grad():
        found = counted(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=setting))
    assert found == count.search_executed([LENGTH - 3, LENGTH], [9, 4])  # padded to the longest of either


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", TINY)
def test_lora_training(name: str, checkpointing: bool) -> None:
    config = config_of(name)
    count = policy(config)
    found = train(adapted(config, count.targets), checkpointing)
    assert found == count.train_executed(ROWS, PROMPT, COMPLETION, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", TINY)
def test_full_fine_tuning(name: str, checkpointing: bool) -> None:
    config = config_of(name)
    found = train(adapted(config, ()), checkpointing)
    assert found == policy(config, ()).train_executed(ROWS, PROMPT, COMPLETION, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen2", ("q_proj",)),
        ("qwen2", ("k_proj",)),
        ("qwen2", ("v_proj",)),
        ("qwen2", ("q_proj", "v_proj")),
        ("qwen2-tied", ("o_proj",)),
        ("qwen3", ("gate_proj",)),
        ("qwen3", ("down_proj",)),
        ("llama", ("k_proj", "down_proj")),
        ("gemma2", ("up_proj", "down_proj")),
        ("phi3", ("qkv_proj",)),
        ("phi3", ("gate_up_proj",)),
        ("gpt_neox", ("query_key_value",)),
        ("gpt_neox", ("dense_h_to_4h",)),
        ("gpt_neox", ("dense", "dense_4h_to_h")),
        ("gpt_neox-serial", ("dense_4h_to_h",)),
        ("olmo2", ("v_proj", "gate_proj")),
        ("mixtral", ("v_proj",)),
        ("qwen2_moe", ("o_proj",)),
    ],
)
def test_lora_on_some_modules(name: str, targets: tuple[str, ...], checkpointing: bool) -> None:
    config = config_of(name)
    found = train(adapted(config, targets), checkpointing)
    assert found == policy(config, targets).train_executed(ROWS, PROMPT, COMPLETION, checkpointing=checkpointing)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "mixtral"])
@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_reward_model(name: str, labels: int, kind: Any) -> None:
    config, (ids, _) = config_of(name), batch()
    made = AutoConfig.for_model(**config, num_labels=labels)
    model = kind.from_config(made, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        found = counted(lambda: model(ids, attention_mask=torch.ones_like(ids)))
    saved = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    reward = RewardFlops(ModelShape.from_config(saved, "reward"))
    assert reward.shape.parameters == model.num_parameters()
    assert found == reward.score_executed(ROWS, LENGTH)
    assert reward.scores([LENGTH] * ROWS).executed == found


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "gemma2"])
def test_a_triton_device_scores_the_completions_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name)
    count = policy(config)
    model = adapted(config, count.targets)
    monkeypatch.setattr(trl_utils, "_use_triton", lambda _: True)  # what the head selects; its kernels stay torch's
    expected = count.train_executed(ROWS, PROMPT, COMPLETION, scored=ROWS * COMPLETION)
    assert train(model) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2.5-1.5B-Instruct", "Qwen2.5-3B", "Qwen2.5-7B-Instruct", "Qwen3-8B"])
class TestPublishedSizes:
    """Real shapes, on the meta device: nothing is computed, everything is counted."""

    @pytest.fixture
    def config(self, name: str) -> dict[str, Any]:
        config = json.loads((published(name) / "config.json").read_text())
        return {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}

    def test_training(self, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # torch refuses to say it of meta
        count = policy(config)
        with torch.device("meta"):
            model = adapted(config, count.targets)
        assert train(model) == count.train_executed(ROWS, PROMPT, COMPLETION)

    def test_prefill_and_decoding(self, config: dict[str, Any]) -> None:
        count = policy(config)
        with torch.device("meta"):
            model = adapted(config, count.targets).eval()
        ids, _ = batch("meta")

        def decode() -> None:
            cache, fed = DynamicCache(config=model.config), ids
            for _ in range(5):
                model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
                fed = ids[:, :1]

        with torch.no_grad():
            assert counted(decode) == count.search_executed([LENGTH] * ROWS, [5] * ROWS)
