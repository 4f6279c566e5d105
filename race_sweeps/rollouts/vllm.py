"""Rollouts with vLLM: the engine keeps the frozen backbone and is handed the adapter alone after each policy update.

The usual colocated sync merges the adapter into the backbone and pushes every weight: gigabytes an update, and in bf16
each merge and unmerge leaves rounding behind. Here an update moves the adapter's megabytes through memory-backed files,
and the backbone's weights are never written.

Each version of the adapter is a request of its own name and path. vLLM hashes both into the keys of its prefix cache,
so no key or value of one policy version can serve another; the cache is emptied before every call besides, so that what
a call costs does not depend on what was sampled before (after a restart it was nothing).

A group is G requests with the same prompt. A request with n = G would be split into the same G requests with the same
seeds (vllm.v1.engine.parallel_sampling), and report the cached tokens of only one of them.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

# Before vllm is imported. The engine lives in this process (workers of a tensor-parallel one do not).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the launcher has given this process its cores
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch._dynamo import config as dynamo_config
from transformers import PreTrainedTokenizerBase

from race_sweeps.config import VLLM_RANKS, RunConfig
from race_sweeps.errors import UserError
from race_sweeps.flops import PolicyFlops
from race_sweeps.memory import GIB
from race_sweeps.rollouts import VLLM_BLOCK, Rollouts, Sampling
from race_sweeps.rollouts.text import Text

log = logging.getLogger("race_sweeps")
STARTING = "starting the engine"
PREFIX = "race_sweeps-adapter-"


class VllmEngine(Text):
    """Samples from a vLLM engine of its own on this process's device.

    Raises `UserError` (one line, with what would work) when the engine cannot start, refuses the adapter or dies; the
    run's folder is as its last checkpoint left it, and a new attempt starts a new engine from the base.
    """

    def __init__(
        self, config: RunConfig, location: str, tokenizer: PreTrainedTokenizerBase, policy: PolicyFlops
    ) -> None:
        super().__init__(tokenizer)
        self.settings = config.rollout.vllm
        self.rank = min(rank for rank in VLLM_RANKS if rank >= config.lora.rank)
        self.executed = replace(policy, rank=self.rank)
        self.dtype = getattr(torch, config.model.dtype)
        self.sleeps = self.settings.sleep and torch.cuda.is_available()
        self.files = AdapterFiles()
        with _explained(STARTING), _no_trace():
            self.llm = self._start(location, config.model.dtype)
        sizes = self.llm.llm_engine.vllm_config
        self.context: int = sizes.model_config.max_model_len
        self.block: int = sizes.cache_config.block_size
        self.warned = False
        self._sleep()

    def _start(self, location: str, dtype: str) -> Any:
        from vllm import LLM

        settings, cpu = self.settings, not torch.cuda.is_available()
        if cpu:  # its sampler's helpers would be compiled with the system's C++ compiler, for half a minute
            dynamo_config.disable = True
        return LLM(
            location,
            dtype=dtype,
            load_format="safetensors",
            use_tqdm_on_load=False,
            skip_tokenizer_init=True,
            generation_config="vllm",  # nothing but what is asked for: no sampling defaults of the model's
            max_model_len=settings.context,
            max_num_seqs=settings.sequences,
            kv_cache_memory_bytes=round(settings.kv_cache * GIB),
            gpu_memory_utilization=0.01,  # only checked against what is free: the cache's size is given
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=self.rank,
            logprobs_mode="processed_logprobs",
            enforce_eager=cpu or settings.eager,
            enable_sleep_mode=self.sleeps,
            seed=0,
            tensor_parallel_size=settings.tensor_parallel,
            distributed_executor_backend="mp" if settings.tensor_parallel > 1 else None,
            block_size=VLLM_BLOCK[not cpu],
        )

    def check(self, model: Any, prompts: Sequence[Any], max_completion: int) -> None:
        """Raise `UserError` for a prompt that leaves no room for `max_completion` tokens in the engine's context."""
        self._fit(self.tokenize(prompts), max_completion)

    def _fit(self, prompt_ids: list[list[int]], max_completion: int) -> None:
        self.fit(prompt_ids, max_completion, self.context, "a larger rollout.vllm.context, if the model allows it")

    def sample(self, model: Any, prompts: Sequence[Any], sampling: Sampling, seed: int) -> Rollouts:
        """One completion per entry of `prompts` (repeat a prompt for a group), all of them in flight at once.

        `executed`: every token the engine ran once, in no padding: prompt tokens not in the cache, and all sampled but
        the last; logits of sampled tokens only; the adapter at the rank the kernels are built for. What it leaves out:
        padding to the batch sizes of CUDA graphs, and prefills repeated when the cache was full.
        """
        prompt_ids = self.tokenize(prompts)
        self._fit(prompt_ids, sampling.max_completion)
        stops = self.stop_tokens(model)
        with _explained("sampling"), _no_trace():
            self._wake()
            request = self._sync(model)
            outputs = self._generate(prompt_ids, sampling, sorted(stops), seed, request)
            self._sleep()
        completion_ids = [list(o.outputs[0].token_ids) for o in outputs]
        logprobs = [
            [step[token].logprob for token, step in zip(ids, o.outputs[0].logprobs, strict=True)]
            for ids, o in zip(completion_ids, outputs, strict=True)
        ]
        cached, modelled = self._cached(prompt_ids, [o.num_cached_tokens for o in outputs])
        executed = sum(
            self.executed.search(len(p), len(t), c) for p, t, c in zip(prompt_ids, completion_ids, cached, strict=True)
        )
        truncated = [ids[-1] not in stops for ids in completion_ids]
        return Rollouts(prompt_ids, completion_ids, truncated, logprobs, cached, executed, modelled)

    def _generate(
        self, prompt_ids: list[list[int]], sampling: Sampling, stops: list[int], seed: int, adapter: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        seeds = random.Random(seed)
        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seeds.getrandbits(32),
                max_tokens=sampling.max_completion,
                stop_token_ids=stops,
                logprobs=0,  # of the sampled token
                detokenize=False,
            )
            for _ in prompt_ids
        ]
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        return list(self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapter))

    def _cached(self, prompt_ids: list[list[int]], reported: list[int | None]) -> tuple[list[int], int]:
        """Cached prompt tokens per completion, and how many of all are the model's and not the engine's: of a prompt
        seen before in the same call, the whole blocks before its last token."""
        if None not in reported:
            return [n for n in reported if n is not None], 0
        if not self.warned:
            log.warning("vLLM reports no cached tokens: they are modelled, and flagged in the ledger (tokens.modelled)")
            self.warned = True
        seen: set[tuple[int, ...]] = set()
        cached = []
        for ids in prompt_ids:
            cached.append((len(ids) - 1) // self.block * self.block if tuple(ids) in seen else 0)
            seen.add(tuple(ids))
        return cached, sum(cached)

    def _sync(self, model: Any) -> Any:
        """The request of the adapter as it is now; handed to the engine if it has changed since the last time."""
        from vllm.lora.request import LoRARequest

        changed = self.files.update(model, self.dtype)
        version, path = self.files.version, str(self.files.path)
        request = LoRARequest(f"policy-{version}", version, path)
        if changed:
            self.llm.llm_engine.add_lora(request)
            self.files.forget_older()
        return request

    def _wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()

    def _sleep(self) -> None:
        """Give the device's memory to the trainer: weights go to the host, the cache is dropped."""
        if self.sleeps:
            self.llm.sleep(level=1)

    def close(self) -> None:
        """Shut the engine down and remove the adapter's files."""
        with suppress(Exception):  # one that died has nothing left to shut down
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        self.files.close()


class AdapterFiles:
    """Versions of an adapter as files, in memory-backed storage where there is one. Numbered from 1; one is kept."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        for left in base.glob(f"{PREFIX}*"):
            _remove_if_abandoned(left)
        new = Path(tempfile.mkdtemp(prefix=".", dir=base))
        (new / "lock").touch()
        self.lock = _locked(new)
        self.folder = new.rename(base / f"{PREFIX}{new.name[1:]}")  # never seen without its lock held
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.version = 0
        self.written: dict[str, torch.Tensor] = {}

    @property
    def path(self) -> Path:
        """The newest version's folder."""
        return self.folder / str(self.version)

    def update(self, model: Any, dtype: torch.dtype) -> bool:
        """Write a new version if the adapter of `model` (PEFT), in `dtype`, differs from the newest. Comparing its
        values costs milliseconds and cannot be fooled by how they came to change."""
        now = {
            name: value.detach().to("cpu", dtype, copy=True).contiguous()
            for name, value in get_peft_model_state_dict(model).items()
        }
        if now.keys() == self.written.keys() and all(torch.equal(now[name], self.written[name]) for name in now):
            return False
        self.version += 1
        self.path.mkdir()
        save_file(now, self.path / "adapter_model.safetensors")
        model.peft_config[model.active_adapter].save_pretrained(self.path)
        self.written = now
        return True

    @property
    def size(self) -> int:
        """Bytes of the newest version."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    def forget_older(self) -> None:
        """Remove every version but the newest."""
        for path in self.folder.iterdir():
            if path.is_dir() and path != self.path:
                shutil.rmtree(path)

    def close(self) -> None:
        """Remove the files."""
        self._remove()


def _locked(folder: Path) -> IO[str] | None:
    """The folder's lock, held while the file is open; None when another process holds it."""
    import fcntl

    lock = (folder / "lock").open("r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _remove_if_abandoned(folder: Path) -> None:
    """Remove what a killed process left in memory: the kernel has freed its lock."""
    with suppress(OSError):
        if (lock := _locked(folder)) is not None:
            shutil.rmtree(folder)
            lock.close()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Whatever vLLM raises, as one line that says what would work."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        lacking = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in text.lower()
        if what == STARTING or lacking:
            remedy = (
                "rollout.vllm.kv_cache (GiB), context, sequences and tensor_parallel that fit the model and the device "
                "(vllm.sleep=true shares a GPU with the trainer)"
            )
        else:
            remedy = "the same command again: it goes on from the newest checkpoint with a new engine"
        raise UserError(
            f"rollout.engine=vllm: {what} failed ({type(error).__name__}: {text[:300]}); what would work: {remedy}"
        ) from error


@contextmanager
def _no_trace() -> Iterator[None]:
    """The engine lives in this process, but its random numbers and its thread count are its own."""
    python, numpy_state, set_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
