"""A view of the run in W&B or TensorBoard, made by a process of its own that follows the run's folder.

The folder is the truth and the queue: training only says up to which step its rows are permanent (a sealed checkpoint
holds them, no restart can take them back). The follower derives one row per optimizer step from the ledger, metrics and
evaluations up to there and hands them on. So the tracker can fail, stall or be absent without touching training, no row
that is later superseded is ever shown, and whatever was not sent can be sent at any later time from the folder alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from race_sweeps.config import TrackingConfig
from race_sweeps.folder import RunFolder

log = logging.getLogger("race_sweeps")
LOG = "tracker.log"


class Tracker:
    """What training says; this one tells nobody."""

    def permanent(self, step: int) -> None:
        """Rows of steps up to `step` will not be taken back."""

    def done(self) -> None:
        """The run is complete, `result.json` written."""


class _Follower(Tracker):
    """Tells a follower process, never waiting for it but at the end of a finished run."""

    def __init__(self, config: TrackingConfig, folder: RunFolder) -> None:
        self.name, self.timeout = config.kind, config.timeout
        self.log = folder.path / LOG
        root = str(Path(__file__).parents[2])
        settings = json.dumps(asdict(config))
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "race_sweeps.tracking.follow", str(folder.path.absolute()), settings],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C and SIGTERM are for training; the follower ends with its input
            )
        assert self.process.stdin is not None
        self.input = self.process.stdin.fileno()
        os.set_blocking(self.input, False)
        self.abandoned = False

    def permanent(self, step: int) -> None:
        self._say(f"permanent {step}")

    def done(self) -> None:
        self._say("done")
        self._close()
        if self.abandoned:
            return
        try:
            if self.process.wait(self.timeout):
                self._abandon("failed")
        except subprocess.TimeoutExpired:
            self._abandon(f"did not end within {self.timeout:g} s (tracking.timeout)")

    def _say(self, message: str) -> None:
        if self.abandoned:
            return
        try:
            os.write(self.input, message.encode() + b"\n")
        except BlockingIOError:
            self._abandon("does not answer")
        except OSError:
            self._abandon("failed")

    def _close(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def _abandon(self, what: str) -> None:
        self.abandoned = True
        self._close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        log.warning("tracking: %s %s%s; training is not affected", self.name, what, self._last_words())

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:300]})" if said else ""


@contextmanager
def tracker(config: TrackingConfig, folder: RunFolder) -> Iterator[Tracker]:
    """The tracker of one attempt. Ending the block without `done` leaves the view as that of an interrupted run."""
    if config.kind == "none":
        yield Tracker()
        return
    try:
        follower = _Follower(config, folder)
    except OSError as error:
        log.warning("tracking: %s could not be started (%s); training is not affected", config.kind, error)
        yield Tracker()
        return
    try:
        yield follower
    finally:
        follower._close()
