"""A cache of model folders: each is built once, by one process, and appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError
from race_sweeps.folder import sync_folder

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a few words."""


def cache_folder() -> Path:
    """`$RACE_SWEEPS_CACHE`, or `race_sweeps` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("RACE_SWEEPS_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "race_sweeps"


def build_once(folder: Path, write: Callable[[Path], None], on_wait: Callable[[], None] | None = None) -> Path:
    """`folder`, filled by `write(temporary folder)` if it does not exist yet.

    Safe to call from several processes at once: one builds, the others wait for it (`on_wait` is called first). The
    folder appears by a rename, so a kill leaves nothing that looks built.
    """
    if folder.exists():
        return folder
    if on_wait is not None:
        on_wait()
    with _locked(folder):
        if not folder.exists():
            _build(folder, write)
    return folder


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    prefix = f".{folder.name}.building-"
    for left in folder.parent.glob(f"{prefix}*"):  # by builds that were killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)
        for file in unfinished.iterdir():
            file.chmod(0o644)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_folder(unfinished)
        unfinished.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting for it; the kernel frees it if the holder dies."""
    import fcntl

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise UserError(
            f"cache {folder.parent}: {error.strerror}; set RACE_SWEEPS_CACHE to a writable folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_side_by_side(jobs: Mapping[str, Callable[[Progress], Any]]) -> None:
    """Run the builds (picklable, the longest first) in as many processes as there are cores, with a progress bar each
    on stderr."""
    if not jobs:
        return
    import multiprocessing
    import queue
    from concurrent.futures import ProcessPoolExecutor

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by torch's threads
    columns = TextColumn("{task.fields[name]:10}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with context.Manager() as manager, Bars(*columns, console=Console(stderr=True)) as bars:
        reports = manager.Queue()
        tasks = {name: bars.add_task("waiting for a core", total=1.0, name=name, start=False) for name in jobs}
        with ProcessPoolExecutor(min(len(jobs), _cores()), mp_context=context) as pool:
            futures = [pool.submit(_build_reporting, name, build, reports) for name, build in jobs.items()]
            while True:
                finished = all(future.done() for future in futures)
                try:
                    while True:
                        name, share, words = reports.get(timeout=0.2)
                        bars.start_task(tasks[name])
                        bars.update(tasks[name], completed=share, description=words)
                except queue.Empty:
                    if finished:
                        break
            for future in futures:
                future.result()


def _build_reporting(name: str, build: Callable[[Progress], Any], reports: Any) -> None:
    build(lambda share, words: reports.put((name, share, words)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
