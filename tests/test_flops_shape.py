"""Sizes read from configurations, and the model convention on cases small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from race_sweeps.errors import UserError
from race_sweeps.flops import ModelShape, PolicyFlops, pairs
from tests.flops_cases import TINY, config_of, published

PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
    "gemma-2-2b": 2_614_341_888,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert ModelShape.from_path(published(name)).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert ModelShape.from_config(config, name).parameters == model.num_parameters()
    assert ModelShape.from_config(model.config.to_dict(), name) == ModelShape.from_config(config, name)


@pytest.mark.parametrize("name", [n for n in TINY if "moe" not in n and n != "mixtral"])
def test_all_linear_is_what_peft_adapts(name: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    shape = ModelShape.from_config(config, name)
    assert PolicyFlops(shape, 3, shape.adaptable).trainable == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not an architecture"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_size": None}, "hidden_size=None must be an integer"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": 10**9}, "hidden_size=1000000000"),
        ({"hidden_size": 25}, "hidden_size=25 is no multiple of 4"),
        ({"vocab_size": "40"}, "vocab_size='40'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_attention_heads": -4}, "num_attention_heads=-4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"num_key_value_heads": None}, "num_key_value_heads=None"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 3 layers"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window=0"),
        (
            {"architectures": ["Qwen2ForQuestionAnswering"]},
            "head that cannot be counted; valid: classes that end in For",
        ),
        ({"model_type": "qwen3_moe"}, "num_experts_per_tok=None|num_experts=None"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "exceeds num_local_experts=2"),
    ],
)
def test_a_config_that_cannot_be_counted_is_one_clear_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        ModelShape.from_config({**config_of("qwen2"), **change}, "config.json")
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        ModelShape.from_path(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        ModelShape.from_path(tmp_path)
    file.write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        ModelShape.from_path(file)
    file.write_text(json.dumps(config_of("qwen2")))
    assert ModelShape.from_path(tmp_path) == ModelShape.from_path(file)


def test_lora_targets_are_checked_against_the_architecture() -> None:
    phi = ModelShape.from_config(config_of("phi3"), "phi3")
    assert phi.adaptable == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    with pytest.raises(UserError, match=r"'q_proj' in phi3.*valid: qkv_proj"):
        PolicyFlops(phi, 4, ("q_proj",))
    with pytest.raises(UserError, match=r"lora\.rank=0"):
        PolicyFlops(phi, 0, ("qkv_proj",))
    experts = ModelShape.from_config(config_of("qwen3_moe"), "qwen3_moe")
    assert experts.adaptable == ("q_proj", "k_proj", "v_proj", "o_proj")  # experts are no nn.Linear


def test_windows_limit_what_a_query_sees() -> None:
    assert pairs(0, 5) == 15
    assert pairs(3, 5) == 4 + 5
    assert pairs(0, 5, 2) == 1 + 2 + 2 + 2 + 2
    assert pairs(4, 6, 2) == 2 + 2
    assert pairs(1, 4, 3) == 2 + 3 + 3
    alternating = ModelShape.from_config(config_of("gemma2"), "gemma2")
    assert alternating.windows == ((5, 2), (None, 1))  # sliding, full, sliding
    assert ModelShape.from_config(config_of("gemma3"), "gemma3").windows == ((5, 6), (None, 1))  # five of six
    assert ModelShape.from_config(config_of("qwen2-sliding"), "qwen2").windows == ((None, 1), (5, 2))


# A model small enough for a pencil: h = 4, H = 2, K = 1, d = 3, f = 5, V = 7, one layer; LoRA r = 2 on q and down.
HAND = {
    "model_type": "qwen3", "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 3,
    "intermediate_size": 5, "num_hidden_layers": 1, "vocab_size": 7, "tie_word_embeddings": True,
}  # fmt: skip
LAMBDA = 4 * 6 + 4 * 3 + 4 * 3 + 6 * 4 + 4 * 5 + 4 * 5 + 5 * 4  # q k v o gate up down = 132
R = 2 * (4 + 6) + 2 * (5 + 4)  # 38


def test_the_model_convention_by_hand() -> None:
    policy = PolicyFlops(ModelShape.from_config(HAND, "hand"), 2, ("down_proj", "q_proj"))
    assert (policy.shape.linear, policy.adapter, policy.shape.attention) == (LAMBDA, R, 24) == (132, 38, 24)
    # prompt of 3, completion of 2: positions 1..4 are fed, 1 + 2 + 3 + 4 = 10 pairs, 2 scored
    assert policy.search(3, 2) == 2 * 170 * 4 + 24 * 10 + 2 * 7 * 4 * 2 == 1712
    # with 2 prompt tokens cached: positions 3 and 4, 3 + 4 = 7 pairs
    assert policy.search(3, 2, cached=2) == 2 * 170 * 2 + 24 * 7 + 112 == 960
    # scoring feeds the last token too: 5 positions, 15 pairs; the reference has no adapter
    assert policy.score(3, 2) == 2 * 170 * 5 + 24 * 15 + 112 == 2172
    assert policy.score(3, 2, adapter=False) == 2 * 132 * 5 + 24 * 15 + 112 == 1792
    # backward: frozen 2 Lambda, LoRA 4 R, attention twice, head once
    assert policy.backward(5, 2) == (2 * 132 + 4 * 38) * 5 + 2 * 24 * 15 + 112 == 2912
    assert policy.train(3, 2) == 2172 + 2912
    # one sampled token: the prefill alone
    assert policy.search(3, 1) == 2 * 170 * 3 + 24 * 6 + 56


def test_full_fine_tuning_by_hand() -> None:
    policy = PolicyFlops.full(ModelShape.from_config(HAND, "hand"))
    assert policy.trainable == policy.shape.parameters == 132 + 2 * 4 + 2 * 3 + 7 * 4 + 4
    assert policy.score(3, 2) == policy.score(3, 2, adapter=False) == 1792
    assert policy.backward(5, 2) == 4 * 132 * 5 + 2 * 24 * 15 + 2 * 112


def test_experts_count_the_router_and_what_a_token_uses() -> None:
    shape = ModelShape.from_config(config_of("mixtral"), "mixtral")
    attention = 24 * 24 + 2 * 24 * 12 + 24 * 24
    assert shape.linear == 3 * (attention + 24 * 6 + 2 * (24 * 112 + 56 * 24))
    stored = 3 * (attention + 24 * 6 + 6 * (24 * 112 + 56 * 24) + 2 * 24) + 2 * 40 * 24 + 24
    assert shape.parameters == stored


@pytest.mark.parametrize(("prompt", "completion", "cached"), [(0, 5, 0), (5, 0, 0), (-1, 5, 0), (5, 5, 5), (5, 5, -1)])
def test_impossible_lengths_are_refused(prompt: int, completion: int, cached: int) -> None:
    policy = PolicyFlops(ModelShape.from_config(HAND, "hand"), 2, ("q_proj",))
    with pytest.raises(UserError, match=f"prompt={prompt}, completion={completion}"):
        policy.search(prompt, completion, cached)


def test_the_paper_convention_gives_the_published_update_fractions() -> None:
    shape = ModelShape.from_path(published("Qwen2.5-3B"))
    reward = ModelShape.from_path(published("Qwen2.5-Math-PRM-7B"))
    policy = PolicyFlops(shape, 16, shape.adaptable)

    def rho(tokens: int, reward_parameters: int = 0) -> float:
        learning = policy.paper_learning(tokens)
        return learning / (policy.paper_search(tokens, reward_parameters) + learning)

    assert policy.trainable == 29_933_568
    assert round(rho(1280), 2) == round(rho(100_000), 2) == 0.72
    assert reward.parameters == 7_615_616_512 - 152_064 * 3584 + 3584 * 3584 + 3584 + 2 * 3584 + 2
    assert round(rho(1280, reward.parameters), 2) == round(rho(77, reward.parameters), 2) == 0.44
