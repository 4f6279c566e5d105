"""Checkpoints of a run: sealed once every byte is on disk, and only taken up again if it still is the same byte."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from race_sweeps.folder import sync_folder, write_json

log = logging.getLogger("race_sweeps")
SEAL = "complete"


def step_of(path: Path) -> int:
    """The optimizer step a checkpoint folder was written at."""
    return int(path.name.rpartition("-")[2])


def seal(path: Path, flops: int) -> None:
    """Make a checkpoint durable and mark it usable. `flops`: what the ledger's sum is at this moment."""
    digests = {}
    for file in _files(path):
        with file.open("rb") as handle:
            digests[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
            os.fsync(handle.fileno())
    write_json(path / SEAL, {"step": step_of(path), "flops": flops, "sha256": digests})
    sync_folder(path)
    sync_folder(path.parent)


def newest(folder: Path) -> tuple[Path, int] | None:
    """The newest checkpoint whose files are what they were, and the ledger's sum at it. Whatever is newer and isn't
    (half-written by a killed attempt, or damaged since) is removed, and the older one is taken."""
    for path in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        flops = _intact(path)
        if flops is not None:
            return path, flops
        log.warning("%s: half-written or damaged; removed, the one before it is taken", path)
        shutil.rmtree(path)
    return None


def _intact(path: Path) -> int | None:
    """The ledger's sum in the seal, if every sealed file is unchanged."""
    try:
        sealed: dict[str, Any] = json.loads((path / SEAL).read_text(encoding="utf-8"))
        for name, digest in sealed["sha256"].items():
            with (path / name).open("rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != digest:
                    return None
        return int(sealed["flops"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file() and file.name != SEAL)
