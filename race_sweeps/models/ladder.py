"""The embedded ladder of tiny policies: Qwen2 architecture, own tokenizer, warm-started on chained arithmetic.

    python -m race_sweeps.models.ladder [NAMES...]      build those (all by default) into the cache

They exist so that a whole sweep, from planning to regime, runs on a CPU without a download. Each takes seconds to build
and is a plain model folder (`config.json`, `model.safetensors`, `tokenizer.json`, `generation_config.json`) that
`from_pretrained` loads, plus `warm_start.json`: the recipe and what it reached. Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from race_sweeps.data import chain
from race_sweeps.errors import UserError, choices, exit_status
from race_sweeps.folder import write_json
from race_sweeps.models.cache import Progress, build_once, build_side_by_side, cache_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

# Bump when the building code changes what comes out: caches of the old code are then left alone and rebuilt.
FORMAT = 1
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, *"0123456789+-*=")
MAX_POSITIONS = 128
MAX_NEW_TOKENS = 4 * chain.MAX_OPERATIONS + 2
"""Tokens of the longest solution, end of sequence included."""

NOISE = chain.Noise(hard=0.4, hard_right=0.3, easy_right=0.9)


@dataclass(frozen=True)
class WarmStart:
    """How a policy is brought to where reinforcement learning can begin.

    `tokens`: prompt and completion tokens read before stopping. `batch`: sequences a step. `rate`: AdamW learning rate,
    after a linear rise over `rise` steps, and falling linearly to 0 over the last share `fall` of the tokens.
    `operations`: problem lengths, drawn evenly.
    """

    tokens: int
    batch: int = 32
    rate: float = 2e-3
    rise: int = 50
    fall: float = 0.3
    seed: int = 0
    operations: tuple[int, ...] = (1, 2, 3, 4)
    noise: chain.Noise = NOISE

    def __post_init__(self) -> None:
        if min(self.tokens, self.batch, self.rise) < 1 or not 0 < self.fall <= 1:
            raise UserError(
                f"warm start tokens={self.tokens}, batch={self.batch}, rise={self.rise}, fall={self.fall}: the first "
                "three must be at least 1, fall above 0 and at most 1"
            )


@dataclass(frozen=True)
class Rung:
    """One size of the ladder. A head is `hidden // heads` wide, at least 32 (vLLM on CPU supports nothing narrower)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    warm_start: WarmStart
    spread: float = 0.03
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads < 32 or self.heads % self.kv_heads:
            raise UserError(
                f"rung hidden={self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}: heads must divide hidden "
                "into parts of at least 32, and kv_heads must divide heads"
            )


# Tuned on the tune split. The larger two are warm-started until their loss flattens; the smallest is stopped before: as
# well-trained as the others it would learn the most from any budget, for it can afford the most completions.
LADDER: dict[str, Rung] = {
    "tiny-s": Rung(64, 2, 2, 1, 192, WarmStart(tokens=450_000, rate=3e-3), spread=0.05),
    "tiny-m": Rung(96, 2, 3, 3, 288, WarmStart(tokens=400_000)),
    "tiny-l": Rung(160, 2, 5, 5, 480, WarmStart(tokens=400_000)),
}


def rung_of(name: str) -> Rung:
    """The rung of that name; `UserError` for another name."""
    if name not in LADDER:
        raise UserError(f"tiny policy {name!r}: {choices(name, LADDER)}")
    return LADDER[name]


def config_dict(name: str, rung: Rung | None = None) -> dict[str, Any]:
    """The fields of the policy's `config.json`, without building it. `rung` stands in for the named one."""
    rung = rung or rung_of(name)
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(VOCABULARY),
        "hidden_size": rung.hidden,
        "intermediate_size": rung.ffn,
        "num_hidden_layers": rung.layers,
        "num_attention_heads": rung.heads,
        "num_key_value_heads": rung.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": rung.spread,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "pad_token_id": VOCABULARY.index(PAD),
        "eos_token_id": VOCABULARY.index(EOS),
        "bos_token_id": None,
        "dtype": "float32",
    }


# --- the cache ---------------------------------------------------------------------------------------------------


def ladder_path(name: str, rung: Rung | None = None) -> Path:
    """The policy's folder, built or not. Its name carries a hash of everything its weights depend on."""
    return cache_folder() / f"{name}-{_digest(name, rung or rung_of(name))}"


def _digest(name: str, rung: Rung) -> str:
    recipe = {"format": FORMAT, "config": config_dict(name, rung), "rung": asdict(rung), "vocabulary": VOCABULARY}
    text = json.dumps({**recipe, "torch": version("torch")}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def build(name: str, progress: Progress | None = None, rung: Rung | None = None) -> Path:
    """Build the policy if the cache lacks it; its folder.

    Safe to call from several processes at once: one builds, the others wait for it. A kill leaves nothing that looks
    built. On one machine the same recipe gives the same weights to the byte. `rung` stands in for the named one.
    """
    rung = rung or rung_of(name)
    report = progress or (lambda share, words: None)

    def write(folder: Path) -> None:
        with single_threaded():
            _write_policy(folder, name, rung, report)

    folder = build_once(ladder_path(name, rung), write, lambda: report(0.0, "waiting for another build"))
    report(1.0, "ready")
    return folder


@contextmanager
def single_threaded() -> Iterator[None]:
    """One torch thread, so that sums have one order; the caller's threads and random stream come back afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar from Transformers: ours is on the screen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# --- the warm start ----------------------------------------------------------------------------------------------


def _write_policy(folder: Path, name: str, rung: Rung, report: Progress) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(rung.warm_start.seed)
    config = Qwen2Config(**config_dict(name, rung))
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
    )
    trained = _warm_start(model, rung.warm_start, report)
    report(0.95, "measuring")
    tokenizer = make_tokenizer()
    began = time.perf_counter()
    measured = measure(model, tokenizer, chain.problems("tune", 256, seed=0))
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(
        folder / "warm_start.json",
        {
            "v": 1,
            "name": name,
            "recipe": asdict(rung),
            "torch": torch.__version__,
            **trained,
            **measured,
            "measuring_seconds": round(time.perf_counter() - began, 2),
        },
    )


def _warm_start(model: Qwen2ForCausalLM, recipe: WarmStart, report: Progress) -> dict[str, Any]:
    """Supervised training on unreliable solutions of train-split problems, the loss on the solution's tokens only."""
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(f"warm start {recipe.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01)
    began, tokens, step, recent = time.perf_counter(), 0, 0, 0.0
    model.train()
    while tokens < recipe.tokens:
        step += 1
        inputs, labels, read = _batch(rng, recipe)
        # Padded on the right, so that causal attention alone hides the padding: no mask, the fast attention path.
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(1.0, step / recipe.rise, (1 - tokens / recipe.tokens) / recipe.fall)
        optimizer.step()
        tokens += read
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        if step % 10 == 0:
            report(0.95 * min(1.0, tokens / recipe.tokens), f"warm start, loss {recent:.3f}")
    model.eval()
    return {"tokens": tokens, "steps": step, "seconds": round(time.perf_counter() - began, 2), "loss": round(recent, 4)}


def _batch(rng: random.Random, recipe: WarmStart) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids and labels, both (batch, longest), labels -100 off the solutions; and the number of real tokens."""
    import torch

    pad, eos = VOCABULARY.index(PAD), VOCABULARY.index(EOS)
    texts: list[tuple[str, str]] = []
    while len(texts) < recipe.batch:
        question = chain.random_question(rng, recipe.operations[len(texts) % len(recipe.operations)])
        if chain.split_of(question) == "train":
            texts.append((question, chain.unreliable_solution(rng, question, recipe.noise)))
    width = max(len(question) + len(solution) for question, solution in texts) + 1
    ids, labels = [], []
    for question, solution in texts:
        row = [_IDS[c] for c in question + solution] + [eos]
        blank = width - len(row)
        ids.append(row + [pad] * blank)
        labels.append([-100] * len(question) + row[len(question) :] + [-100] * blank)
    read = sum(len(question) + len(solution) + 1 for question, solution in texts)
    return torch.tensor(ids), torch.tensor(labels), read


_IDS = {token: i for i, token in enumerate(VOCABULARY)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, padding on the left as generation needs; other characters become `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(_IDS), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def measure(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[chain.Problem], samples: int = 8
) -> dict[str, Any]:
    """Sampled pass@1 and pass@`samples` at temperature 1, and greedy pass@1; an answer counts if the text ended."""
    sampled = _answers(model, tokenizer, [row["question"] for row in rows for _ in range(samples)], greedy=False)
    greedy = _answers(model, tokenizer, [row["question"] for row in rows], greedy=True)
    hits = [
        [answer == row["answer"] for answer in sampled[i * samples : (i + 1) * samples]] for i, row in enumerate(rows)
    ]
    return {
        "problems": len(rows),
        "pass@1": sum(map(sum, hits)) / (len(rows) * samples),
        "pass@1_greedy": sum(answer == row["answer"] for answer, row in zip(greedy, rows, strict=True)) / len(rows),
        f"pass@{samples}": sum(map(any, hits)) / len(rows),
    }


def _answers(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], *, greedy: bool
) -> list[str | None]:
    """The final answer of a completion of each question; None where the text did not end in time."""
    import torch

    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    answers: list[str | None] = []
    for start in range(0, len(questions), 512):
        encoded = tokenizer(list(questions[start : start + 512]), return_tensors="pt", padding=True)
        with torch.no_grad():
            out = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                **options,
            )
        for row in out[:, encoded["input_ids"].shape[1] :].tolist():
            ended = _IDS[EOS] in row
            answers.append(chain.final_answer(tokenizer.decode(row, skip_special_tokens=True)) if ended else None)
    return answers


# --- command line ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named policies (default: all), in as many processes as there are cores; print what they reached."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m race_sweeps.models.ladder", description="Build the embedded tiny policies into the cache."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(LADDER)} (default: all)")
    names = list(dict.fromkeys(parser.parse_args(arguments).names)) or list(LADDER)

    def build_and_show() -> int:
        build_all(names)
        _print_figures(names)
        return 0

    return exit_status("ladder", build_and_show)


def build_all(names: Sequence[str]) -> None:
    """Build those the cache lacks, in as many processes as there are cores, with a progress bar each on stderr."""
    build_side_by_side(jobs(names))


def jobs(names: Iterable[str]) -> dict[str, Callable[[Progress], Path]]:
    """What builds those that the cache lacks, largest first, for `build_side_by_side`."""
    missing = [name for name in dict.fromkeys(names) if not ladder_path(name).exists()]
    return {name: partial(build, name) for name in sorted(missing, key=lambda name: -rung_of(name).hidden)}


def _print_figures(names: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "built in", "pass@1", "greedy", "pass@8", title="tune split, temperature 1")
    for name in names:
        folder = ladder_path(name)
        figures = json.loads((folder / "warm_start.json").read_text(encoding="utf-8"))
        rates = [f"{figures[key]:.2f}" for key in ("pass@1", "pass@1_greedy", "pass@8")]
        table.add_row(name, f"{figures['seconds']:.0f} s", *rates)
    console = Console()
    console.print(table)
    for name in names:
        console.print(str(ladder_path(name)), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
