"""Share of a training step that accounting takes: counting FLOPs, the allocator, and the durable ledger rows.

The functions that account are wrapped with a clock during real training of tiny-m; the rest of a step is the policy's.

    python -m benchmarks.accounting [STEPS]
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_overhead import Clock, settings, steps_per_generation
from race_sweeps import config as configuration
from race_sweeps.folder import RunFolder, write_atomic
from race_sweeps.train.run import PointRun


class Stopwatch:
    """Sums the time inside wrapped functions; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def wrap(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return inner(*args, **kwargs)
            self.depth, started = 1, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.depth = 0

        object.__setattr__(owner, name, timed)


def main(steps: int = 200) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    config = settings("sampler")
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        point = RunFolder(Path(folder) / "point")
        write_atomic(point.config, configuration.save(config))
        run = PointRun(config, point)
        clock = Clock(steps, steps_per_generation(config))
        run.extra_callbacks.append(clock)
        watch.wrap(run, "record")
        for name in ("search", "train", "score", "search_executed", "train_executed", "paper_search", "paper_learning"):
            watch.wrap(run.policy, name)
        for name in ("next_groups", "row_passes"):
            watch.wrap(run.allocator, name)
        run.train()
        share = watch.seconds / (steps + clock.warmup) / clock.seconds_per_step
        print(
            f"accounting: {watch.seconds / (steps + clock.warmup) * 1e6:.0f} us of a step of "
            f"{clock.seconds_per_step * 1000:.1f} ms: {share:.2%}"
        )


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
