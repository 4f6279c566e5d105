"""What the user sees while tasks run: a live table on a terminal, single lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launchers import Outcome, Progress, Task

Unit = Callable[[float], str]

COLOURS = {"done": "green", "failed": "red", "stopped": "yellow", "busy": "yellow"}
WHERE = {"failed": " in {folder}", "busy": " in {folder}"}
OVERHEAD = 5
"""Lines of the table that are not rows: counts, shared labels, heading, the line for what does not fit, a spare one."""


GAP = 1
SHORTEST_BAR = 5


def clock(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class Row:
    """A running task: when it began, where its progress stood then, and where it stands."""

    task: Task
    began: float
    first: Progress
    last: Progress

    @property
    def fraction(self) -> float:
        return min(1.0, self.last.done / self.last.total) if self.last.total > 0 else 0.0


@dataclass
class Board:
    """Counts and rates of a launch. It costs as much as there are running tasks, however many wait.

    `progress` is asked about running tasks only, and once more about each that ends. Times are those of `now`.
    """

    tasks: Sequence[Task]
    progress: Callable[[Path], Progress]
    now: Callable[[], float] = time.monotonic
    rows: dict[str, Row] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.began = self.now()
        self._worked = 0.0  # by tasks that ended
        self._seconds = 0.0  # they took
        self._totals: list[float] = [0.0, 0.0]  # sum and number of the totals of tasks that ended
        values: dict[str, set[str]] = {}
        for task in self.tasks:
            for name, value in task.label.items():
                values.setdefault(name, set()).add(value)
        self.shared = {name: next(iter(v)) for name, v in values.items() if len(v) == 1 and len(self.tasks) > 1}
        self.columns = [name for name in values if name not in self.shared]

    @property
    def elapsed(self) -> float:
        return self.now() - self.began

    @property
    def pending(self) -> int:
        return len(self.tasks) - len(self.rows) - self.counts.total()

    def start(self, task: Task) -> None:
        first = self._read(task)
        self.rows[task.id] = Row(task, self.now(), first, first)

    def refresh(self) -> None:
        for row in self.rows.values():
            row.last = self._read(row.task)

    def end(self, outcome: Outcome) -> None:
        row = self.rows.pop(outcome.id)
        last = self._read(row.task)
        self.counts[outcome.state] += 1
        self._worked += max(0.0, last.done - row.first.done)
        self._seconds += self.now() - row.began
        if last.total > 0:
            self._totals[0] += last.total
            self._totals[1] += 1

    def eta(self) -> float | None:
        """Seconds until everything has run, from the work done per worker and second so far; None before any.

        A waiting task counts as the mean of those seen. Where no progress is reported, finished tasks are the unit.
        """
        now, rows = self.now(), list(self.rows.values())
        seconds = self._seconds + sum(now - row.began for row in rows)
        if not rows or seconds <= 0:
            return None
        known = [row.last.total for row in rows if row.last.total > 0]
        number = self._totals[1] + len(known)
        worked = self._worked + sum(max(0.0, row.last.done - row.first.done) for row in rows)
        if number and worked > 0:
            each = (self._totals[0] + sum(known)) / number
            left = [max(0.0, (row.last.total or each) - row.last.done) for row in rows]
            rate = worked / seconds
        elif self.counts["done"]:
            each, rate = 1.0, self.counts["done"] / self._seconds if self._seconds > 0 else 0.0
            left = [max(0.0, 1.0 - (now - row.began) * rate) for row in rows]
        else:
            return None
        if rate <= 0:
            return None
        return max((sum(left) + self.pending * each) / (rate * len(rows)), max(left) / rate)

    def summary(self) -> str:
        """`12 done, 1 failed, 2 running, 285 pending`, without what is zero."""
        counts = {state: self.counts[state] for state in COLOURS}
        counts |= {"running": len(self.rows), "pending": self.pending}
        return ", ".join(f"{n:,} {name}" for name, n in counts.items() if n) or "nothing to run"

    def timing(self) -> str:
        eta = self.eta()
        return f"elapsed {clock(self.elapsed)}" + (f", about {clock(eta)} left" if eta is not None else "")

    def _read(self, task: Task) -> Progress:
        try:
            return self.progress(task.folder)
        except Exception as error:  # a half-written file must not end a sweep; it is shown, and read again
            return Progress(0.0, 0.0, f"no progress: {type(error).__name__}: {error}")


def render(board: Board, unit: Unit, width: int, height: int, message: str = "") -> RenderableType:
    """The board in fewer than `height` lines: counts, then one line per running task as far as they fit."""
    settled = board.counts.total() + sum(row.fraction for row in board.rows.values())
    top = Table.grid(padding=(0, 1))
    top.add_row(
        ProgressBar(total=max(1, len(board.tasks)), completed=settled, width=min(20, width // 8)),
        Text(f"{board.summary()}; {board.timing()}", no_wrap=True, overflow="ellipsis"),
    )
    lines: list[RenderableType] = [top]
    if message:
        lines.append(Text(message, style="yellow", no_wrap=True, overflow="ellipsis"))
    elif board.shared:
        lines.append(Text(_labels(board.shared), style="dim", no_wrap=True, overflow="ellipsis"))
    room = max(0, height - OVERHEAD)
    rows = list(board.rows.values())
    if rows and room:
        lines.append(_table(board, unit, rows[:room], width))
    if len(rows) > room:
        lines.append(Text(f"and {len(rows) - room:,} more running", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines[: max(1, height - 1)])


def _table(board: Board, unit: Unit, rows: Sequence[Row], width: int) -> Table:
    """Values come first; remarks, full headings and bars get, in this order, what width is left."""
    now = board.now()
    columns = {"point": [row.task.id for row in rows]}
    columns |= {name: [row.task.label.get(name, "") for row in rows] for name in board.columns}
    columns |= {"spent": [_spent(row.last, unit) for row in rows], "time": [clock(now - row.began) for row in rows]}
    notes = [" ".join(row.last.note.split()) for row in rows]

    widths = {name: max(map(cell_len, values)) for name, values in columns.items()}
    left = width - sum(widths.values()) - GAP * (len(widths) - 1)
    note = max(0, min(max(map(cell_len, notes)), left - GAP))
    left -= note + GAP if note else 0
    for name in widths:
        extra = max(0, min(cell_len(name) - widths[name], left))
        widths[name] += extra
        left -= extra
    bar = min(20, left - GAP)

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    cells: list[list[RenderableType]] = [[] for _ in rows]
    for name, values in columns.items():
        right = name in ("spent", "time")
        table.add_column(
            Text(name), width=widths[name], no_wrap=True, overflow="ellipsis", justify="right" if right else "left"
        )
        for cell, value in zip(cells, values, strict=True):
            cell.append(Text(value))
        if name == "spent" and bar >= SHORTEST_BAR:
            table.add_column("", width=bar)
            for cell, row in zip(cells, rows, strict=True):
                known = row.last.total > 0
                cell.append(ProgressBar(total=1.0, completed=row.fraction) if known else Text(""))
        if name == "spent" and note:
            table.add_column("", width=note, no_wrap=True, overflow="ellipsis")
            for cell, text in zip(cells, notes, strict=True):
                cell.append(Text(text))
    for cell in cells:
        table.add_row(*cell)
    return table


def _spent(progress: Progress, unit: Unit) -> str:
    return f"{unit(progress.done)} of {unit(progress.total)}" if progress.total > 0 else ""


def _labels(label: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in label.items())


class Display(Protocol):
    """Told what happens; shows it in its own way."""

    board: Board

    def __enter__(self) -> Display: ...
    def __exit__(self, *exception: object) -> None: ...

    def say(self, message: str) -> None:
        """One line about the launch as a whole, to stand until the next one; empty: nothing to say any more."""

    def start(self, task: Task) -> None: ...
    def end(self, task: Task, outcome: Outcome) -> None: ...

    def tick(self) -> None:
        """Called several times a second; shows progress when it is time to."""


class Lines:
    """For logs: a line when a task starts and ends, and one about the whole every `every` seconds."""

    def __init__(self, board: Board, unit: Unit, console: Console, every: float = 30.0) -> None:
        self.board, self._unit, self._console, self._every = board, unit, console, every
        self._last = board.now()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def say(self, message: str) -> None:
        if message:
            say(self._console, message)

    def start(self, task: Task) -> None:
        self.board.start(task)
        self.say(f"start {task.id} {_labels(task.label)}".rstrip())

    def end(self, task: Task, outcome: Outcome) -> None:
        self.board.end(outcome)
        self.say(_ending(task, outcome))

    def tick(self) -> None:
        if self.board.now() - self._last < self._every:
            return
        self._last = self.board.now()
        self.board.refresh()
        known = [row.last for row in self.board.rows.values() if row.last.total > 0]
        running = Progress(sum(p.done for p in known), sum(p.total for p in known))
        spent = f"; running: {_spent(running, self._unit)}" if known else ""
        self.say(f"{self.board.summary()}{spent}; {self.board.timing()}")


class LiveTable:
    """For terminals: a table redrawn `rate` times a second; what goes wrong scrolls by above it."""

    def __init__(self, board: Board, unit: Unit, console: Console, rate: float = 3.0) -> None:
        self.board, self._unit, self._console, self._rate = board, unit, console, rate
        self._last = float("-inf")
        self._message = ""
        self._live = Live(
            get_renderable=lambda: render(board, unit, console.width, console.height, self._message),
            console=console,
            auto_refresh=False,  # no thread: the launch loop draws
            transient=True,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveTable:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def say(self, message: str) -> None:
        self._message = message
        self._draw()

    def start(self, task: Task) -> None:
        self.board.start(task)

    def end(self, task: Task, outcome: Outcome) -> None:
        self.board.end(outcome)
        if outcome.state in WHERE:
            say(self._console, _ending(task, outcome), COLOURS[outcome.state])

    def tick(self) -> None:
        if self.board.now() - self._last >= 1 / self._rate:
            self.board.refresh()
            self._draw()

    def _draw(self) -> None:
        self._last = self.board.now()
        self._live.refresh()


def _ending(task: Task, outcome: Outcome) -> str:
    reason = f": {outcome.reason}" if outcome.reason else ""
    where = WHERE.get(outcome.state, "").format(folder=task.folder)
    return f"{outcome.state} {task.id} after {clock(outcome.seconds)}{reason}{where}"


class _Forgiving:
    """A stream whose reader may go away (a closed terminal, a finished pager) without ending the sweep."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console_on(stream: IO[str]) -> Console:
    """A console that writes to `stream` and survives its end."""
    return Console(file=_Forgiving(stream), force_terminal=stream.isatty())  # type: ignore[arg-type]


def say(console: Console, message: str, style: str = "") -> None:
    """Print one line as it is: no markup, no wrapping."""
    console.print(Text(message, style=style), soft_wrap=True, highlight=False)


def display_on(console: Console, board: Board, unit: Unit) -> Display:
    """A live table where `console` is a terminal that can move its cursor, else lines."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveTable(board, unit, console) if live else Lines(board, unit, console)
