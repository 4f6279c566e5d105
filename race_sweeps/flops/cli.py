"""`python -m race_sweeps flops MODEL`: what one completion, one step and one run cost, and how it splits. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from race_sweeps.errors import UserError, choices
from race_sweeps.flops.policy import PolicyFlops
from race_sweeps.flops.reward import RewardFlops
from race_sweeps.flops.shape import ModelShape

CONVENTIONS = ("model", "executed", "paper")
HELP = """\
python -m race_sweeps flops MODEL [options]: compute of GRPO with LoRA, exactly

  MODEL                a name of conf/model (1.5b, tiny-s, ...), a config.json, or the folder that holds one
  --prompt P           prompt tokens of a completion (256)
  --completion T       sampled tokens of a completion (1024)
  --group G            completions per prompt (8)
  --prompts N          prompts per step (32)
  --kept K             completions of a group that are trained on (all G); fractions are averages over groups
  --mu M               passes over what is kept (1)
  --steps N            steps of a run (100); a step generates once
  --lora-rank R        adapter rank, on every linear module (16); 0 is full fine-tuning
  --prm MODEL          a reward model that reads prompt and completion of every rollout
  --cached             a prefix cache: a group's prompt is read once
  --old                old log-probs by a forward of the trainer, not the sampler's own
  --beta               a reference forward (KL penalty)
  --convention NAME    model (default), executed or paper; the paper's estimate is always shown beside it
  --checkpointing      gradient checkpointing (changes executed only)
  --json               machine-readable, exact integers
Conventions and formulas: docs/ACCOUNTING.md
"""


@dataclass(frozen=True)
class Settings:
    """What is counted; lengths in tokens."""

    model: str
    prompt: int
    completion: int
    group: int
    prompts: int
    kept: float
    mu: float
    steps: int
    lora_rank: int
    prm: str | None
    cached: bool
    old: bool
    beta: bool
    convention: str
    checkpointing: bool

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "prompts", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.group < 2:
            raise UserError(f"--group {self.group}: GRPO compares completions within a group: at least 2")
        if not 0 < self.kept <= self.group:
            raise UserError(
                f"--kept {self.kept:g}: completions kept of a group of {self.group}: above 0, at most the group"
            )
        if not 1 <= self.mu < 1000:
            raise UserError(f"--mu {self.mu:g}: passes over what is kept: at least 1 (train on less with --kept)")
        if self.lora_rank < 0:
            raise UserError(f"--lora-rank {self.lora_rank}: at least 1, or 0 for full fine-tuning")
        if "," in self.convention:
            raise UserError(
                f"--convention {self.convention}: rows of two conventions do not add up; one table shows one (the "
                "paper's estimate has its own columns)"
            )
        if self.convention not in CONVENTIONS:
            raise UserError(f"--convention {self.convention}: {choices(self.convention, CONVENTIONS)}")


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"flops: {message}; see python -m race_sweeps flops --help")


def parse(arguments: Sequence[str]) -> tuple[Settings, bool]:
    """The settings, and whether JSON is wanted. Raises `UserError`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL")
    for name, default in (("prompt", 256), ("completion", 1024), ("group", 8), ("prompts", 32), ("steps", 100),
                          ("lora-rank", 16)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kept", type=float)
    parser.add_argument("--mu", type=float, default=1.0)
    parser.add_argument("--prm", metavar="MODEL")
    parser.add_argument("--convention", default="model")
    for flag in ("cached", "old", "beta", "checkpointing", "json"):
        parser.add_argument(f"--{flag}", action="store_true")
    given = vars(parser.parse_args(arguments))
    as_json = bool(given.pop("json"))
    given["kept"] = given["group"] if given["kept"] is None else given["kept"]
    return Settings(**given), as_json


def resolve(name: str) -> ModelShape:
    """A model by its name in `conf/model`, its `config.json`, or the folder that holds it. Raises `UserError`."""
    from omegaconf import OmegaConf

    from race_sweeps.compose import conf_dir
    from race_sweeps.models import ladder

    known = {file.stem: file for file in (conf_dir() / "model").glob("*.yaml")}
    if name in known:
        tree: Any = OmegaConf.to_container(OmegaConf.load(known[name]))
        fields = tree.get("model", tree)
        config = ladder.config_dict(name) if fields["source"] == "ladder" else fields["config"]
        return ModelShape.from_config(config, f"conf/model/{name}.yaml")
    path = Path(name).expanduser()
    if path.exists():
        return ModelShape.from_path(path)
    raise UserError(f"model {name!r}: no such name, config.json or folder; {choices(name, sorted(known))}")


@dataclass(frozen=True)
class Counts:
    """FLOPs of one completion's work by kind, and the split of a step, in one convention."""

    completion: dict[str, int]
    step: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.step.values())

    @property
    def shares(self) -> dict[str, float]:
        names = {"rho": "learning", "sigma": "search", "phi": "reward"}
        return {share: self.step[phase] / self.total for share, phase in names.items()}


def count(settings: Settings, policy: PolicyFlops, reward: RewardFlops | None, convention: str) -> Counts:
    """Count a step of `prompts` groups, every completion of the stated lengths."""
    s, p, t = settings, settings.prompt, settings.completion
    generated = s.prompts * s.group
    kept = round(s.prompts * s.kept)
    if convention == "paper":
        tokens = p + t
        one = {
            "search": policy.paper_search(tokens),
            "learning": policy.paper_learning(tokens),
            "reward": 2 * reward.shape.parameters * tokens if reward else 0,
        }
        return Counts(one, {phase: generated * flops for phase, flops in one.items()})
    if convention == "executed":  # one row at a time is what equal lengths cost; the head as on a Triton device
        search = policy.search(p, t) if s.cached else policy.search_executed([p], [t])
        one = {
            "search": search,
            "train": policy.train_executed(1, p, t, checkpointing=s.checkpointing, scored=t),
            "old": policy.score_executed(1, p, t, scored=t),
            "reference": policy.score_executed(1, p, t, adapter=False, scored=t),
            "reward": reward.score_executed(1, p + t) if reward else 0,
        }
    else:
        one = {
            "search": policy.search(p, t),
            "train": policy.train(p, t),
            "old": policy.score(p, t),
            "reference": policy.score(p, t, adapter=False),
            "reward": reward.score(p + t) if reward else 0,
        }
    searched = generated * one["search"]
    if s.cached:
        searched = s.prompts * (one["search"] + (s.group - 1) * policy.search(p, t, cached=p - 1))
    learning = round(kept * s.mu) * one["train"] + s.old * kept * one["old"] + s.beta * generated * one["reference"]
    return Counts(one, {"search": searched, "learning": learning, "reward": generated * one["reward"]})


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(HELP, end="")
        return 0
    settings, as_json = parse(arguments)
    shape = resolve(settings.model)
    if shape.score:
        raise UserError(f"model {settings.model!r}: a reward model has no tokens to sample; pass it as --prm")
    rank = settings.lora_rank
    policy = PolicyFlops(shape, rank, shape.adaptable) if rank else PolicyFlops.full(shape)
    reward = RewardFlops(resolve(settings.prm)) if settings.prm else None
    ours = count(settings, policy, reward, settings.convention)
    paper = count(settings, policy, reward, "paper")
    if as_json:
        print(json.dumps(_to_json(settings, policy, ours, paper), indent=1))
    else:
        _show(settings, policy, reward, ours, paper)
    return 0


def _to_json(settings: Settings, policy: PolicyFlops, ours: Counts, paper: Counts) -> dict[str, Any]:
    def tree(counts: Counts) -> dict[str, Any]:
        return {
            "completion": counts.completion,
            "step": {**counts.step, "total": counts.total},
            "run": {phase: flops * settings.steps for phase, flops in {**counts.step, "total": counts.total}.items()},
            **counts.shares,
        }

    return {
        "v": 1,
        "settings": vars(settings),
        "parameters": policy.shape.parameters,
        "trainable": policy.trainable,
        settings.convention: tree(ours),
        "paper": tree(paper),
    }


def _show(settings: Settings, policy: PolicyFlops, reward: RewardFlops | None, ours: Counts, paper: Counts) -> None:
    from rich.console import Console
    from rich.table import Table

    from race_sweeps import units

    s = settings
    how = f"LoRA r = {s.lora_rank}" if s.lora_rank else "full fine-tuning"
    sizes = f"{units.count(policy.shape.parameters)} parameters, {how}: {units.count(policy.trainable)} trained"
    print(f"{s.model} ({policy.shape.architecture}): {sizes}")
    if reward is not None:
        print(f"reward model {s.prm}: {units.count(reward.shape.parameters)} parameters, reads prompt and completion")
    passes = "one pass" if s.mu == 1 else f"{s.mu:g} passes"
    kept = "all" if s.kept == s.group else f"{s.kept:g} of each {s.group}"
    steps = f"{s.prompts} prompts x {s.group} completions of {s.prompt} + {s.completion} tokens, {passes} over {kept}"
    extra = [n for n, on in (("old log-probs", s.old), ("reference", s.beta), ("prefix cache", s.cached)) if on]
    print("; ".join([f"a run: {s.steps} steps of {steps}", *extra]))
    table = Table()
    table.add_column("phase", no_wrap=True)
    for name in (f"{s.convention}: step", "run", "share", "paper: step", "run", "share"):
        table.add_column(name, justify="right", no_wrap=True)

    def cells(counts: Counts, flops: int) -> list[str]:
        return [units.flops(flops), units.flops(flops * s.steps), f"{flops / counts.total:.3f}"]

    names = {"learning": "learning (rho)", "search": "search (sigma)", "reward": "reward (phi)"}
    for phase, name in names.items():
        table.add_row(name, *cells(ours, ours.step[phase]), *cells(paper, paper.step[phase]))
    table.add_section()
    table.add_row("total", *cells(ours, ours.total), *cells(paper, paper.total))
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    hidden = {"old": s.old, "reference": s.beta}
    shown = {name: flops for name, flops in ours.completion.items() if flops and hidden.get(name, True)}
    one = ", ".join(f"{name} {units.flops(flops)}" for name, flops in shown.items())
    print(f"one completion ({s.convention}): {one}")
    print(f"rho {ours.shares['rho']:.3f} ({s.convention}), {paper.shares['rho']:.3f} (paper)")
