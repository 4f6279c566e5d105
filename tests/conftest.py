"""Shared fixtures. Policies are built once into the user's cache (RACE_SWEEPS_CACHE) and reused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from race_sweeps import config as configuration
from race_sweeps.compose import compose_points
from race_sweeps.config import RunConfig
from race_sweeps.folder import RunFolder, write_atomic

MakePoint = Callable[[Sequence[str]], RunFolder]


def compose_one(*overrides: str) -> RunConfig:
    """The configuration of a single grid point."""
    ((_, config),) = compose_points(overrides, multirun=False).points
    return config


def shared(path: str) -> Path:
    """A file or folder of the shared data (beside a parent folder, or in RACE_SWEEPS_SHARED); skips the test where it
    is not at hand."""
    named = os.environ.get("RACE_SWEEPS_SHARED")
    folders = [Path(named)] if named else [parent / "shared" for parent in Path(__file__).resolve().parents]
    for folder in folders:
        if (folder / "data" / path).exists():
            return folder / "data" / path
    pytest.skip(f"no shared/data/{path} (set RACE_SWEEPS_SHARED)")


@pytest.fixture
def make_point(tmp_path: Path) -> MakePoint:
    """Writes a point's folder, ready for `run_point`."""

    def make(overrides: Sequence[str]) -> RunFolder:
        number = len(list(tmp_path.glob("point-*")))
        folder = RunFolder(tmp_path / f"point-{number}")
        write_atomic(folder.config, configuration.save(compose_one(*overrides)))
        return folder

    return make
