"""What the SLURM tests run in jobs: one entry point, told by a file in its folder what to do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from launchers import Busy, Stopped
from race_sweeps.folder import RunFolder, append_rows, single_writer, write_json

STEP_SECONDS = 0.2


def run(path: str) -> None:
    """Do what `behaviour` says, e.g. `steps 10`; leave `result.json` in the end."""
    folder = RunFolder(Path(path))
    with single_writer(folder) as mine:
        if not mine:
            raise Busy
        if not folder.done:
            _behave(folder)


def _behave(folder: RunFolder) -> None:
    name, *arguments = (folder.path / "behaviour").read_text().split()
    row = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "begin": time.time()}
    append_rows(folder.path / "runs.jsonl", [row])
    if name == "fail" and not (folder.path / "mended").exists():
        raise ValueError("this point is broken")
    if name == "vanish":
        return
    if name == "greedy":
        hoard = b"x" * 500_000_000
        time.sleep(5)
        del hoard
    steps = _steps(folder.path, int(arguments[0])) if name in ("steps", "endless") else 0
    if name == "sleep":
        time.sleep(float(arguments[0]))
    write_json(folder.result, {**row, "end": time.time(), "steps": steps})


def _steps(folder: Path, total: int) -> int:
    """Count to `total`, slowly; on SIGTERM save where it was and stop. Goes on from there when run again."""
    asked = []

    def stop(_signum: int, _frame: FrameType | None) -> None:
        asked.append(True)

    signal.signal(signal.SIGTERM, stop)
    checkpoint = folder / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    while step < total:
        time.sleep(STEP_SECONDS)
        step += 1
        append_rows(folder / "ledger.jsonl", [{"step": step}])
        if asked or step % 10 == 0:
            write_json(checkpoint, step)
        if asked:
            raise Stopped(f"checkpointed at step {step}")
    return step
