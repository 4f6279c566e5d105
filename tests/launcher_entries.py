"""Entry points that the launcher's tests run in worker processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from launchers import Busy, Stopped
from race_sweeps.errors import UserError


def write(folder: str, /, **values: Any) -> None:
    """Leave `values` in seen.json of the folder, whole or not at all."""
    draft = Path(folder) / ".seen"
    draft.write_text(json.dumps(values))
    draft.rename(Path(folder) / "seen.json")


def succeed(folder: str) -> None:
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"written\n")
    write(folder, path=folder, pid=os.getpid())


def trivial(folder: str) -> None:
    pass


def fail(folder: str) -> None:
    raise ValueError("first line\nsecond line [bold]")


def user_error(folder: str) -> None:
    raise UserError("budget.flops=-1: must be positive")


def busy(folder: str) -> None:
    raise Busy


def stopped(folder: str) -> None:
    raise Stopped("saved at step 3")


def exits(folder: str) -> None:
    sys.exit(3)


def vanish(folder: str) -> None:
    os._exit(0)


def kill_itself(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    write(folder, child=child.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(folder: str) -> None:
    import ctypes

    ctypes.string_at(0)


def environment(folder: str) -> None:
    """What a worker is given: environment, cores, signals, session, and what the fork server had imported."""
    server = Path(f"/proc/{os.getppid()}/status").read_text()
    write(
        folder,
        environ=dict(os.environ),
        cores=sorted(os.sched_getaffinity(0)),
        sigint=signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        sigterm=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        leader=os.getpgrp() == os.getpid(),
        server_session=os.getsid(os.getppid()),
        server=os.getppid(),
        server_threads=int(next(x for x in server.splitlines() if x.startswith("Threads:")).split()[1]),
        modules=sorted(sys.modules),
        main=getattr(sys.modules["__main__"], "__file__", None),
    )
    time.sleep(0.5)  # long enough to be seen in a table


def train(folder: str) -> None:
    """A few optimizer steps with whatever torch the fork server has left behind."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(5):
        loss = model(torch.randn(256, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    write(folder, threads=torch.get_num_threads(), losses=losses)


def patient(folder: str) -> None:
    """Works until told to stop, then saves and says so; counts how often it was told."""
    told = []

    def save(_signum: int, _frame: FrameType | None) -> None:
        told.append(time.time())

    signal.signal(signal.SIGTERM, save)
    write(folder, pid=os.getpid(), ppid=os.getppid())
    while not told:
        time.sleep(0.02)
    time.sleep(0.3)
    (Path(folder) / "checkpoint").write_text(str(len(told)))
    raise Stopped("saved")


def stubborn(folder: str) -> None:
    """Never stops by itself, and has a child."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    write(folder, pid=os.getpid(), ppid=os.getppid(), child=child.pid)
    time.sleep(600)
