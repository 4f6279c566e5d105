"""The transformers engine on a real policy."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROMPTS = ["7+3*8-2=", "1+1+1=", "9*9-4=", "5-6+7*3="]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from race_sweeps import models
    from race_sweeps.rollouts.transformers import TransformersEngine
    from tests.conftest import compose_one

    config = compose_one("model=tiny-s")
    location = models.prepare(config)
    model = AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(location, padding_side="left")
    return model, TransformersEngine(tokenizer, models.policy_flops(config))


def test_logprobs_are_those_of_the_sampled_tokens(parts: tuple[Any, Any]) -> None:
    import torch

    from race_sweeps.rollouts import Sampling

    model, engine = parts
    for temperature in (1.0, 0.7):
        rollouts = engine.sample(model, PROMPTS, Sampling(18, 3, temperature), seed=1)
        for prompt, completion, logprobs in zip(
            rollouts.prompt_ids, rollouts.completion_ids, rollouts.logprobs, strict=True
        ):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=2e-5, rtol=0)


def test_a_seed_is_a_sample_and_leaves_no_trace(parts: tuple[Any, Any]) -> None:
    import torch

    from race_sweeps.rollouts import Sampling

    model, engine = parts
    before = torch.get_rng_state()
    first = engine.sample(model, PROMPTS, Sampling(18, 3), seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert engine.sample(model, PROMPTS, Sampling(18, 3), seed=5) == first
    assert engine.sample(model, PROMPTS, Sampling(18, 3), seed=6).completion_ids != first.completion_ids
    assert not model.training


def test_completions_end_at_a_stop_token_or_are_marked_truncated(parts: tuple[Any, Any]) -> None:
    from race_sweeps.rollouts import Sampling

    model, engine = parts
    eos = engine.tokenizer.eos_token_id
    whole = engine.sample(model, PROMPTS, Sampling(18, 3, 0.0), seed=0)
    short = engine.sample(model, PROMPTS, Sampling(3, 3, 0.0), seed=0)
    assert whole.truncated == [False] * 4
    assert all(ids[-1] == eos and eos not in ids[:-1] for ids in whole.completion_ids)
    assert short.truncated == [True] * 4
    assert [ids[:3] for ids in whole.completion_ids] == short.completion_ids
