"""The plan of a sweep as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from race_sweeps import units
from race_sweeps.sweep import Point

COARSE = 0.05  # share of a rung by which whole groups may miss it, from which on it is said


def show(points: Sequence[Point], console: Console | None = None) -> None:
    """Print one row per grid point, seeds together, and the totals of the sweep."""
    console = console or Console()
    if not console.is_terminal:  # piped: one row a line, whatever the width
        console = Console(width=200)
    table = Table(title=f"plan of {points[0].config.stage}: {len(points)} grid points", title_justify="left")
    for name in ("model", "reward", "fraction", "seeds"):
        table.add_column(name, no_wrap=True)
    for name in ("C", "rungs", "rho", "kept", "mu", "generations", "steps", "completions",
                 "C_search", "C_learning", "C_reward", "device", "GiB", "GPU-h"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    cells: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        label = point.label
        key = (label["model"], label["reward"], label["update fraction"], repr(point.plan))
        cells.setdefault(key, []).append(point)
    for (model, reward, fraction, _), members in cells.items():
        plan, config = members[0].plan, members[0].config
        hours = "-" if plan.gpu_hours is None else f"{plan.gpu_hours:.3g}"
        table.add_row(
            model,
            reward,
            fraction,
            ",".join(str(p.config.seed) for p in members),
            units.flops(plan.budget),
            " ".join(f"{share:g}" for share in config.budget.rungs),
            f"{plan.rho:.3f}",
            f"{plan.kept:.2f}/{config.train.group}",
            f"{plan.mu:.2f}",
            units.count(plan.generations),
            units.count(plan.optimizer_steps),
            units.count(plan.completions),
            units.flops(plan.flops["search"]),
            units.flops(plan.flops["learning"]),
            units.flops(plan.flops["reward"]),
            config.plan.device or "-",
            f"{plan.memory['total'] / 2**30:.3g}",
            hours,
        )
    console.print(table)
    total = sum(point.plan.flops["total"] for point in {point.id: point for point in points}.values())
    line = f"{units.flops(total)} of training compute in all (model convention)"
    for device, utilisation in dict.fromkeys((p.config.plan.device, p.config.plan.utilisation) for p in points):
        if device:
            assumed = [p for p in points if (p.config.plan.device, p.config.plan.utilisation) == (device, utilisation)]
            in_all = sum(point.plan.gpu_hours or 0.0 for point in assumed)
            line += f", {in_all:.4g} GPU-hours on {device} at {utilisation:.0%} utilisation"
    console.print(line)
    lengths: dict[tuple[int, int], list[str]] = {}
    for point in points:
        rollout = point.config.rollout
        models = lengths.setdefault((rollout.expected_prompt, rollout.expected_completion), [])
        models += [point.config.model.name] * (point.config.model.name not in models)
    for (prompt, completion), names in lengths.items():
        console.print(
            f"expected lengths of {', '.join(names)}: prompt {prompt}, completion {completion} tokens "
            "(rollout.expected_prompt, rollout.expected_completion)"
        )
    for line in _coarse_rungs(points):
        console.print(line)


def _coarse_rungs(points: Sequence[Point]) -> list[str]:
    """A run stops at the end of a group: rungs of a few groups are missed by up to half of one."""
    worst: dict[str, tuple[float, float]] = {}
    for point in points:
        plan, config = point.plan, point.config
        groups = [plan.completions / config.train.group * share for share in config.budget.rungs]
        model = config.model.name
        worst[model] = max([worst.get(model, (0.0, 0.0)), *((0.5 / n, n) for n in groups)])
    return [
        f"{model}: its smallest rung holds {groups:.1f} groups, so C there can miss it by up to {miss:.0%}; raise "
        "budget.flops or leave the smallest of budget.rungs out"
        for model, (miss, groups) in worst.items()
        if miss > COARSE
    ]
