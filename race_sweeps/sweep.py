"""A sweep's grid points: their plans, folders and manifest. No torch."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from race_sweeps import config as configuration
from race_sweeps import manifest
from race_sweeps.config import RunConfig, point_id
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder, mark_simulated, write_atomic, write_json
from race_sweeps.plan import OutOfReach, Plan, plan

WRITERS = 16  # nearly all of a write's time is waiting for the disk
PACKAGES = ("race-sweeps", "torch", "transformers", "trl", "peft", "hydra-core", "numpy")


@dataclass(frozen=True)
class Point:
    """One grid point, planned."""

    overrides: tuple[str, ...]
    config: RunConfig
    plan: Plan
    folder: RunFolder

    @property
    def id(self) -> str:
        return self.folder.point_id

    @property
    def label(self) -> dict[str, str]:
        config = self.config
        return {
            "model": config.model.name,
            "reward": config.reward.name,
            "update fraction": config.update_fraction.name,
            "seed": str(config.seed),
            **({"trainer": "simulated"} if self.plan.simulated else {}),
        }


def make_points(
    composed: Sequence[tuple[tuple[str, ...], RunConfig]], left_out: Callable[[str], None] = lambda _: None
) -> list[Point]:
    """Plan every point. Equal points are one, but for what their plans assume (`plan.device=a100,h200`). Raises
    `UserError` for the first that cannot be planned; with `plan.out_of_reach=leave_out`, those out of reach are no
    error as long as others are within it, and `left_out` is told of each once."""
    points: dict[tuple[str, str | None, float], Point] = {}
    missing: dict[str, OutOfReach] = {}
    for overrides, config in composed:
        identity = point_id(config)
        folder = RunFolder(Path(config.runs_dir) / config.sweep / "points" / identity)
        assumed = (identity, config.plan.device, config.plan.utilisation)
        try:
            points.setdefault(assumed, Point(overrides, config, plan(config), folder))
        except OutOfReach as error:
            if config.plan.out_of_reach == "refuse":
                raise
            missing.setdefault(str(error), error)
    if missing and not points:
        raise next(iter(missing.values()))
    for message in missing:
        left_out(message)
    return list(points.values())


def sweep_folder(points: Sequence[Point]) -> Path:
    """The one folder all points of a command live in."""
    folders = {point.folder.path.parents[1] for point in points}
    if len(folders) > 1:
        raise UserError(f"sweep: one command fills one sweep folder, not {', '.join(sorted(map(str, folders)))}")
    return folders.pop()


def write_folders(points: Sequence[Point], command: Sequence[str]) -> Path:
    """Write what every point was given (`config.yaml`, `plan.json`) and the manifest; points of earlier commands in
    the same sweep stay listed. Returns the sweep's folder."""
    folder = sweep_folder(points)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        with ThreadPoolExecutor(WRITERS) as pool:
            for written in [pool.submit(_write_point, point) for point in points]:
                written.result()
        if any(point.plan.simulated for point in points):
            mark_simulated(folder)
        with manifest.edit(folder) as content:
            listed = {row["id"]: row for row in content.get("points", [])}
            listed |= {point.id: _manifest_row(point) for point in points}
            launches = [*content.get("launches", []), {"time": now, "command": list(command)}]
            content.update(
                {
                    "v": 1,
                    "sweep": folder.name,
                    "command": list(command),
                    "created": content.get("created", now),
                    "git": _git(),
                    "versions": _versions(),
                    "simulated": content.get("simulated", False) or any(p.plan.simulated for p in points),
                    "launches": launches,
                    "points": list(listed.values()),
                }
            )
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; choose another runs_dir") from None
    return folder


def _write_point(point: Point) -> None:
    if not point.folder.config.exists():
        write_atomic(point.folder.config, configuration.save(point.config))
    if not point.folder.plan.exists():
        write_json(point.folder.plan, point.plan.to_json())


def _manifest_row(point: Point) -> dict[str, Any]:
    config = point.config
    return {
        "id": point.id,
        "model": config.model.name,
        "reward": config.reward.name,
        "update_fraction": config.update_fraction.name,
        "seed": config.seed,
        **({"trainer": "simulated"} if point.plan.simulated else {}),
        "overrides": list(point.overrides),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git() -> dict[str, Any]:
    """Revision of the code's checkout, and whether it had uncommitted changes; nulls outside a checkout."""

    def run(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = run("rev-parse", "HEAD")
    return {"revision": revision, "dirty": bool(run("status", "--porcelain")) if revision else None}
