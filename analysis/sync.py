"""Upload a sweep's finished runs to W&B, whatever tracked them before, each whole and once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from race_sweeps.config import TrackingConfig
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder
from race_sweeps.tracking.rows import EXACT_ROWS, load_config, rows

REACH_SECONDS = 10.0
UPLOAD_SECONDS = 900.0


def sync(folder: Path, say: Callable[[str], None] = print) -> int:
    """Upload every finished point of the sweep in `folder` that W&B was not given yet; returns the exit status.

    An offline run that does not hold exactly what the ledger says (or there is none: the point was not tracked) is
    built from the point's folder first. W&B replaces a run that it has by the same run's upload. Raises `UserError`
    when wandb, a key or the server is missing.
    """
    from race_sweeps.tracking.sinks import is_uploaded, mark_uploaded

    points = [RunFolder(path) for path in sorted((folder / "points").glob("*")) if path.is_dir()]
    finished = [point for point in points if point.done]
    todo = [point for point in finished if not is_uploaded(point)]
    open_points = len(points) - len(finished)
    later = f"; {open_points} unfinished, to be uploaded once they are done" if open_points else ""
    if not todo:
        say(f"{folder}: nothing to upload: {len(finished)} finished runs are there already{later}")
        return 0
    url = _server(len(todo))
    failed = []
    for number, point in enumerate(todo, 1):
        try:
            _upload(_offline_run(point))
            mark_uploaded(point)
            say(f"{number}/{len(todo)} {point.point_id} uploaded")
        except UserError as error:
            failed.append(point.point_id)
            say(f"{number}/{len(todo)} {point.point_id} not uploaded: {error}")
    say(f"{folder}: {len(todo) - len(failed)} of {len(todo)} runs uploaded to {url}{later}")
    return 1 if failed else 0


def _server(runs: int) -> str:
    """The server's address, once wandb, a key and the server are known to be there."""
    from race_sweeps.tracking.sinks import wandb_key_is_set

    missing = f"{runs} runs stay to be uploaded"
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise UserError(f'wandb is not installed; pip install "race-sweeps[wandb]"; {missing}') from None
    if not wandb_key_is_set():
        raise UserError(f"no W&B key: run wandb login, or set WANDB_API_KEY, then the same command; {missing}")
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urllib.request.urlopen(url, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{url} does not answer ({reason}); run the same command with a network; {missing}") from None
    return url


def _offline_run(point: RunFolder) -> Path:
    """The folder of an offline run that holds exactly the ledger."""
    from race_sweeps.tracking.sinks import offline_file

    if not _holds_the_ledger(point):
        _build(point, load_config(point).tracking)
        if not _holds_the_ledger(point):
            raise UserError(f"{point.path}: the offline run could not be built; see {point.path / 'tracker.log'}")
    file = offline_file(point)
    assert file is not None
    return file.parent


def _holds_the_ledger(point: RunFolder) -> bool:
    from race_sweeps.tracking import wandb_file
    from race_sweeps.tracking.sinks import offline_file

    file = offline_file(point)
    if file is None:
        return False
    try:
        run = wandb_file.read(file)
    except UserError:
        return False
    shown = [row.get(EXACT_ROWS) for row in run.history]
    staged = all(Path(path).exists() for path in run.staged)  # they move with the folder, their names do not
    return run.finished and staged and shown == [row.values[EXACT_ROWS] for row in rows(point, -1)]


def _build(point: RunFolder, config: TrackingConfig) -> None:
    from race_sweeps.tracking import tracker

    offline = replace(config, kind="wandb", mode="offline")
    with tracker(offline, point) as built:
        built.done()


def _upload(run: Path) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "wandb", "sync", "--include-synced", str(run.absolute())],
                cwd=run.parent,  # it logs to the folder it runs in
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=UPLOAD_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"wandb sync did not end within {UPLOAD_SECONDS:g} s") from None
        output.seek(0)
        said = [line.strip() for line in output if line.strip()]
    problems = [line for line in said if "error" in line.lower()]
    if done.returncode or problems:
        raise UserError(f"wandb sync: {(problems or said or ['failed'])[-1][:300]}")
