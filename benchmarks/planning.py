"""Planning speed: a 10,000-point grid, and the time a point takes over plain Hydra composing it.

python -m benchmarks.planning [POINTS]
"""

from __future__ import annotations

import sys
import time

from hydra import compose, initialize_config_dir

from race_sweeps.compose import CONFIG_NAME, compose_points, conf_dir
from race_sweeps.sweep import make_points


def main(points: int = 10_000) -> None:
    seeds = points // 15  # stage A has three sizes and five update fractions
    started = time.perf_counter()
    composed = compose_points(["stage=A", "model=1.5b,3b,7b", f"seed=range(0,{seeds})"], multirun=True).points
    composing = time.perf_counter() - started
    started = time.perf_counter()
    made = make_points(composed)
    planning = time.perf_counter() - started
    print(f"{len(made)} points: composed and checked in {composing:.2f} s, planned in {planning:.2f} s")

    sample = [lines for lines, _ in composed[:: len(composed) // 200]][:200]
    started = time.perf_counter()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        for lines in sample:
            compose(CONFIG_NAME, list(lines))
    plain = (time.perf_counter() - started) / len(sample)
    ours = composing / len(made)
    print(f"plain Hydra {plain * 1000:.1f} ms a point (of {len(sample)}), ours {ours * 1000:.2f}: {plain / ours:.0f}x")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
