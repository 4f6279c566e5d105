"""The command line: `python -m race_sweeps [plan] [-m] [OVERRIDES]`.

Overrides are Hydra's. Exit status: 0 all done (or in a queue), 1 a point failed, 2 a mistake in the input, 130 stopped
by a signal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from race_sweeps.errors import UserError, choices, exit_status

if TYPE_CHECKING:
    from launchers import Launcher, Outcome
    from race_sweeps.sweep import Point

HELP = """\
race_sweeps: where should a fixed RL post-training budget go?

  python -m race_sweeps [OVERRIDES]           run one grid point
  python -m race_sweeps -m [OVERRIDES]        run a sweep: the stage's grid, or comma-separated values
  python -m race_sweeps plan [-m] [OVERRIDES] print the plan and run nothing (no GPU, no weights needed)
  python -m race_sweeps flops MODEL [options] what a completion, a step and a run cost (flops --help)

  python -m race_sweeps -m stage=A model=tiny-s,tiny-m,tiny-l      on a laptop
  python -m race_sweeps plan -m stage=A model=1.5b,3b,7b           a published grid, planned

options
  -m, --multirun   every combination of the stage's grid and of a,b,c overrides
  --json           plan: machine-readable, one object per point
  --cfg job        show the composed configuration (Hydra; also --info, --hydra-help, --shell-completion)
  -h, --help       this text

overrides (Hydra's grammar)   group=choice: stage model reward judge rollout update_fraction data eval_sets tracking
                                            scale trainer hydra/launcher
                              key=value:    budget.flops=4e11 update_fraction.rho=0.5 seed=0,1,2 sweep=NAME ...
A finished point is skipped and an unfinished one continued: run the same command again after any interruption.
Then: python -m analysis report SWEEP
"""
TRAINED = "race_sweeps.train.run:run_point"
SIMULATED = "race_sweeps.train.simulated:run_point"
HYDRA_FLAGS = (
    "--cfg",
    "-c",
    "--resolve",
    "--package",
    "-p",
    "--info",
    "-i",
    "--hydra-help",
    "--shell-completion",
    "-sc",
)


@dataclass(frozen=True)
class Arguments:
    command: str
    multirun: bool
    as_json: bool
    overrides: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next(iter(arguments), "--help")
    if command != "flops" and any(a in ("-h", "--help") for a in [command, *arguments]):
        print(HELP, end="")
        return 0
    return exit_status("race_sweeps", lambda: _dispatch(command, arguments))


def _dispatch(command: str, arguments: list[str]) -> int:
    if command == "flops":
        from race_sweeps.flops.cli import main as count_flops

        return count_flops(arguments[1:])
    if any(a.split("=")[0] in HYDRA_FLAGS for a in arguments):
        return _hydra(arguments)
    parsed = parse(arguments)
    return _plan(parsed) if parsed.command == "plan" else _run(parsed, arguments)


def parse(arguments: Sequence[str]) -> Arguments:
    """Split flags from overrides. Raises `UserError` for an unknown flag or command."""
    rest = list(arguments)
    command = "run"
    if rest and "=" not in rest[0] and not rest[0].startswith(("-", "~", "+")):
        command = rest.pop(0)
        if command != "plan":
            raise UserError(f"command {command!r}: {choices(command, ['plan', 'flops'])}, or overrides such as stage=A")
    flags = [a for a in rest if a.startswith("-")]
    valid = {"-m", "--multirun"} | ({"--json"} if command == "plan" else set())
    for flag in flags:
        if flag not in valid:
            raise UserError(f"option {flag}: {choices(flag, sorted(valid))}")
    return Arguments(
        command=command,
        multirun="-m" in flags or "--multirun" in flags,
        as_json="--json" in flags,
        overrides=[a for a in rest if not a.startswith("-")],
    )


def _points(arguments: Arguments) -> tuple[list[Point], dict[str, Any]]:
    from race_sweeps.compose import compose_points
    from race_sweeps.sweep import make_points

    composed = compose_points(arguments.overrides, multirun=arguments.multirun)
    points = make_points(composed.points, lambda why: print(f"left out of the grid: {why}", file=sys.stderr))
    return points, composed.launcher


def _plan(arguments: Arguments) -> int:
    points, _ = _points(arguments)
    if arguments.as_json:
        print(json.dumps([{"point": p.id, **p.label, **p.plan.to_json()} for p in points], indent=1))
    else:
        from race_sweeps.plan_table import show

        show(points)
    return 0


def _run(arguments: Arguments, argv: list[str]) -> int:
    from hydra.utils import instantiate

    from race_sweeps.sweep import write_folders

    planned, launcher_config = _points(arguments)
    points = list({point.id: point for point in planned}.values())
    launcher = instantiate(launcher_config, _convert_="all")
    _refuse_what_cannot_run(points, launcher)
    folder = write_folders(points, ["python", "-m", "race_sweeps", *argv])
    todo = [point for point in points if not point.folder.done]
    said = "SIMULATED: " if any(point.plan.simulated for point in points) else ""
    print(
        f"{said}{folder}: {len(points)} points, {len(points) - len(todo)} done before, {len(todo)} to run", flush=True
    )
    outcomes = _launch(launcher, todo) if todo else []
    for outcome in outcomes:
        if outcome.state in ("failed", "busy"):
            print(f"{outcome.id} {outcome.state}: {outcome.reason}", file=sys.stderr)
    states = {outcome.state for outcome in outcomes}
    if "submitted" in states:
        _say_where(outcomes, folder)
    elif states <= {"done"}:
        print(f"all {len(points)} points done; now: python -m analysis report {folder}")
    return 130 if "stopped" in states else 1 if states & {"failed", "busy"} else 0


def _say_where(outcomes: Sequence[Outcome], folder: Path) -> None:
    """After a launch into a queue: its jobs, and how to follow them."""
    queued = [outcome for outcome in outcomes if outcome.state == "submitted"]
    before = sum(bool(outcome.reason) for outcome in queued)
    jobs = sorted({outcome.job.partition("_")[0] for outcome in queued}, key=int)
    print(f"{len(queued) - before} points submitted, {before} in the queue before: jobs {', '.join(jobs)}")
    print(f"now: python -m launchers status {folder}")


def _refuse_what_cannot_run(points: Sequence[Point], launcher: Launcher) -> None:
    """One line before anything starts, instead of a failure in every point."""
    from race_sweeps import data, rollouts
    from race_sweeps.rewards.custom import imported

    launcher.check()
    points = [point for point in points if not point.plan.simulated]
    heavy = sorted({p.config.model.name for p in points if p.config.model.needs_gpu})
    if heavy:
        from launchers.local import LocalLauncher, visible_gpus

        if isinstance(launcher, LocalLauncher) and not visible_gpus():
            raise UserError(
                f"model={','.join(heavy)}: needs a GPU and this machine has none; nothing was started. What would "
                "work: a tiny model (model=tiny-s,tiny-m,tiny-l), a cluster (hydra/launcher=slurm), or the plan alone "
                "(python -m race_sweeps plan ...)"
            )
    for config in (point.config for point in points):
        rollouts.refuse_what_cannot_run(config)
        if config.reward.kind == "custom":
            imported(config.reward.function or "")
    _refuse_scorers(points, launcher)
    seen: list[tuple[object, ...]] = []
    for config in (point.config for point in points):
        wanted = (config.data, config.eval.problems, config.eval.sets)
        if wanted not in seen:  # a broken file is one line here, not a failure per point
            data.load(config, chat=True)
            seen.append(wanted)


def _refuse_scorers(points: Sequence[Point], launcher: Launcher) -> None:
    from launchers.local import LocalLauncher, visible_gpus

    if not isinstance(launcher, LocalLauncher) or visible_gpus():
        return
    for config in (point.config for point in points):
        for key, scorer in (("reward", config.reward.scorer), ("judge", config.judge)):
            if scorer.name is not None and scorer.source == "path" and not Path(scorer.path or "").is_dir():
                raise UserError(
                    f"{key}: {scorer.name} needs a GPU and this machine has none; nothing was started. What would "
                    f"work: {key}=prm-tiny-m (with data=chain), a local folder of a smaller one ({key}"
                    f"{'.scorer' * (key == 'reward')}.path=...), or a cluster (hydra/launcher=slurm)"
                )


def _launch(launcher: Launcher, points: list[Point]) -> list[Outcome]:
    from launchers import Task
    from launchers.local import LocalLauncher
    from race_sweeps import units
    from race_sweeps.models import prepare_all
    from race_sweeps.progress import progress

    real = [point for point in points if not point.plan.simulated]
    prepare_all([point.config for point in real])
    if not real and isinstance(launcher, LocalLauncher):
        launcher = replace(launcher, preload=[SIMULATED.partition(":")[0]])  # not torch
    tasks = [
        Task(
            point.id,
            point.folder.path.absolute(),
            SIMULATED if point.plan.simulated else TRAINED,
            point.label,
            gpus=int(point.config.model.needs_gpu and not point.plan.simulated),
            hours=None if point.plan.simulated else point.plan.gpu_hours,
        )
        for point in points
    ]
    totals = {task.folder: float(point.plan.budget) for task, point in zip(tasks, points, strict=True)}
    return launcher.launch(tasks, lambda path: progress(path, totals[path]), units.flops)


def _hydra(arguments: list[str]) -> int:
    """Hydra's own introspection flags, on the same configuration."""
    import hydra

    from race_sweeps import compose

    multirun = bool({"-m", "--multirun"} & set(arguments))
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    compose.compose_points(overrides, multirun=multirun)  # mistakes in one line, before Hydra explains at length

    sys.argv = [sys.argv[0], *arguments]
    hydra.main(config_path=str(compose.conf_dir()), config_name=compose.CONFIG_NAME, version_base="1.3")(
        lambda _: None
    )()
    return 0
