"""How a sweep stands, for people: counts, then the points that are not done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launchers.states import STANDINGS, PointState
from launchers.table import console_on
from race_sweeps import units

COLOURS = {"done": "green", "running": "cyan", "queued": "blue", "pending": "dim"}
"""Everything else is red."""

WIDTH = 200
MARGIN = 6
"""Lines of a terminal left free: counts, heading, hint."""


class Screen:
    """Prints a sweep's standing, once or again and again in place."""

    def __init__(self, sweep: Path, show_done: bool) -> None:
        self._sweep, self._show_done = sweep, show_done
        self._console: Console = console_on(sys.stdout)
        if not self._console.is_terminal:  # a file or a pipe has room
            self._console.width = WIDTH
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def live(self) -> AbstractContextManager[object]:
        """While in use, `update` draws in place."""
        return self._live

    def update(self, points: Sequence[PointState]) -> None:
        self._live.update(self._view(points, max(1, self._console.height - MARGIN)), refresh=True)

    def print(self, points: Sequence[PointState]) -> None:
        self._console.print(self._view(points, None))

    def _view(self, points: Sequence[PointState], room: int | None) -> RenderableType:
        rows = [point for point in points if self._show_done or point.state != "done"]
        rows.sort(key=lambda point: -STANDINGS.index(point.state))  # what needs attention first
        simulated = "SIMULATED " if any(point.label.get("trainer") == "simulated" for point in points) else ""
        parts: list[RenderableType] = [Text(f"{simulated}{self._sweep.name}: {_summary(points)}")]
        if rows:
            parts.append(_table(rows[:room], points))
        if room is not None and len(rows) > room:
            parts.append(Text(f"and {len(rows) - room:,} more", style="dim"))
        if hint := _hint(points, self._sweep):
            parts.append(Text(hint, style="dim"))
        return Group(*parts)


def _summary(points: Sequence[PointState]) -> str:
    counts = Counter(point.state for point in points)
    done = sum(point.progress.done for point in points)
    total = sum(point.progress.total for point in points)
    spent = f"; {units.flops(done)} of {units.flops(total)}" if total else ""
    return f"{', '.join(f'{counts[s]:,} {s}' for s in STANDINGS if counts[s]) or 'no points'}{spent}"


def _table(rows: Sequence[PointState], points: Sequence[PointState]) -> Table:
    """Labels that all points share are left out."""
    names = [
        name
        for name in dict.fromkeys(name for point in points for name in point.label)
        if len({point.label.get(name) for point in points}) > 1
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("point", *names, "state", "job"):
        table.add_column(name, no_wrap=True)
    table.add_column("spent", justify="right", no_wrap=True)
    table.add_column("")
    for point in rows:
        progress = point.progress
        spent = f"{units.flops(progress.done)} of {units.flops(progress.total)}" if progress.total else ""
        table.add_row(
            point.id,
            *[Text(point.label.get(name, "")) for name in names],
            Text(point.state, style=COLOURS.get(point.state, "red")),
            point.job,
            spent,
            Text(point.reason or progress.note),
        )
    return table


def _hint(points: Sequence[PointState], sweep: Path) -> str:
    standings = {point.state for point in points}
    if standings == {"done"}:
        return f"now: python -m analysis report {sweep}"
    if standings <= {"done", "queued", "running"}:
        return ""
    if any(point.array for point in points):
        return f"to continue what has ended: python -m launchers resume {sweep}"
    return "to continue: run the sweep's command again"
