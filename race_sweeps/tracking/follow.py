"""The follower: `python -m race_sweeps.tracking.follow FOLDER TRACKING`, told what is permanent on its input."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from race_sweeps import manifest
from race_sweeps.config import TrackingConfig
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder
from race_sweeps.tracking.rows import identity, load_config, rows
from race_sweeps.tracking.sinks import Sink, open_sink


def follow(folder: RunFolder, sink: Sink, messages: Iterable[str]) -> None:
    """Hand rows on as `permanent STEP` lines come in; all there are at `done`. The input's end ends it."""
    _refuse_other_rows(folder, sink)
    after, complete = sink.after, False
    for message in messages:
        word, _, step = message.strip().partition(" ")
        complete = word == "done"
        for row in rows(folder, after, None if complete else int(step)):
            sink.write(row)
            after = row.step
        if complete:
            break
    sink.finish(complete)


def _refuse_other_rows(folder: RunFolder, sink: Sink) -> None:
    """What is shown already must be what the ledger says; it isn't after a fall-back beyond what was permanent."""
    if sink.total is None:
        return
    held = next((str(row.values["ledger/total"]) for row in rows(folder, sink.after - 1, sink.after)), "nothing")
    if held != sink.total:
        sink.finish(False)
        raise UserError(
            f"the tracked run holds {sink.total} FLOPs at step {sink.after}, the ledger {held}: its work was redone "
            "from an older checkpoint; delete that run, then python -m analysis sync SWEEP uploads this one"
        )


def main() -> int:
    os.nice(10)  # a view gives way to training
    folder = RunFolder(Path(sys.argv[1]))
    config = TrackingConfig(**json.loads(sys.argv[2]))
    messages = _watched(config.timeout)
    try:
        with manifest.exclusive(folder.path / ".tracker.lock"):  # the last attempt's follower may still be finishing
            follow(folder, open_sink(config, folder, identity(folder, load_config(folder))), messages)
    except UserError as error:
        print(error, flush=True)
        return 1
    return 0


def _watched(timeout: float) -> Iterable[str]:
    """Lines of the input, read at once; after its end, whatever hangs has `timeout` seconds left."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)
        time.sleep(timeout)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with W&B's own process; the group is the follower's own

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, None)


if __name__ == "__main__":
    sys.exit(main())
