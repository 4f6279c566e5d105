"""`python -m launchers`: what became of a sweep, wherever it runs. Loads no torch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from race_sweeps.errors import UserError, choices, exit_status, refuse_unknown_command

if TYPE_CHECKING:
    from launchers.states import PointState

COMMANDS = ("status", "logs", "resume", "retry", "cancel")
EPILOG = """\
status ends with 0 when every point is done, 3 when what is not is queued or running (or was never started), and 1 when
some point needs attention: failed, stopped, cancelled, lost, or without a result. All commands end with 2 after a
mistake in the input, told in one line. SWEEP: a sweep's folder, or its name under runs/.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m launchers", description="Follow and steer a sweep, on this machine or on SLURM.", epilog=EPILOG
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("sweep", metavar="SWEEP")
        return command

    status = add("status", "how every point stands")
    status.add_argument("--json", action="store_true", help="one object per point")
    status.add_argument("--all", action="store_true", help="list the points that are done, too")
    again = "again and again, until nothing is queued or running"
    status.add_argument("--watch", metavar="SECONDS", nargs="?", type=float, const=5.0, help=again)
    logs = add("logs", "what a point has printed")
    logs.add_argument("point", metavar="POINT", help="its id, or the beginning of it")
    logs.add_argument("-f", "--follow", action="store_true", help="and what it prints from now on, until it ends")
    resume = add("resume", "submit again what has ended without a result")
    retry = add("retry", "submit again what has failed, and nothing else")
    retry.add_argument("--failed", action="store_true", help="the default, and all there is")
    for command in (resume, retry):
        command.add_argument(
            "changes", metavar="KEY=VALUE", nargs="*", help="other resources than before, e.g. mem_gb=64"
        )
    cancel = add("cancel", "end the jobs of points that are queued or running")
    cancel.add_argument("points", metavar="POINT", nargs="*", help="only these (default: all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_status("launchers", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    parser = _parser()
    refuse_unknown_command(arguments, COMMANDS)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    sweep = find_sweep(options.sweep)
    if options.command == "status":
        return _status(sweep, options)
    if options.command == "logs":
        return _logs(sweep, options.point, options.follow)
    if options.command == "cancel":
        return _cancel(sweep, options.points)
    return _resubmit(sweep, options.changes, only_failed=options.command == "retry")


def find_sweep(text: str, root: Path = Path("runs")) -> Path:
    """The folder with a sweep's manifest, for a path or a name under `root`. Raises `UserError`."""
    from race_sweeps.manifest import NAME

    for folder in (Path(text), root / text):
        if (folder / NAME).is_file():
            return folder.absolute()
    found = sorted(path.parent.name for path in root.glob(f"*/{NAME}"))
    known = f"in {root}/: {choices(Path(text).name, found)}" if found else f"none in {root}/; give a sweep's folder"
    raise UserError(f"{text!r} is not a sweep; {known}")


def _status(sweep: Path, options: argparse.Namespace) -> int:
    from launchers import states

    points = states.look(sweep)
    if options.json:
        print(json.dumps([_as_json(point) for point in points], indent=1))
        return _verdict(points)
    from launchers.status_table import Screen

    screen = Screen(sweep, show_done=options.all)
    if options.watch is None:
        screen.print(points)
        return _verdict(points)
    with screen.live():
        screen.update(points)
        while any(point.state in states.OPEN for point in points):
            time.sleep(max(0.1, options.watch))
            points = states.look(sweep)
            screen.update(points)
    screen.print(points)
    return _verdict(points)


def _verdict(points: Sequence[PointState]) -> int:
    standings = {point.state for point in points}
    if standings <= {"done"}:
        return 0
    return 3 if standings <= {"done", "queued", "running", "pending"} else 1


def _as_json(point: PointState) -> dict[str, Any]:
    return {
        "point": point.id,
        "state": point.state,
        "reason": point.reason,
        "flops": point.progress.done,
        "budget": point.progress.total,
        "job": point.job,
        "slurm": point.slurm,
        "restarts": point.restarts,
        **point.label,
    }


def _logs(sweep: Path, text: str, follow: bool) -> int:
    from launchers import states

    point = _find_point(states.look(sweep), text)
    log = sweep / "points" / point.id / "log.txt"
    own = states.slurm_log(sweep, point.job)
    if not log.exists() and not follow:
        if not own.exists():
            raise UserError(f"{log}: nothing there; {point.id} is {point.state}{point.reason and ': '}{point.reason}")
        log = own
    place = 0
    while True:
        # Asked before reading, so that the last words of a point that ends in between are not missed.
        going = follow and states.look(sweep, [point.id])[0].state in states.OPEN
        if log.exists():
            with log.open("rb") as file:
                file.seek(place)
                sys.stdout.write(file.read().decode("utf-8", "replace"))
                place = file.tell()
            sys.stdout.flush()
        if not going:
            break
        time.sleep(1.0)
    if log != own and own.exists():
        print(f"launchers: SLURM's own messages: {own}", file=sys.stderr)
    return 0


def _find_point(points: Sequence[PointState], text: str) -> PointState:
    found = [point for point in points if point.id.startswith(text)]
    exact = [point for point in found if point.id == text]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise UserError(f"{text!r} begins the ids of {len(found)} points: {', '.join(p.id for p in found)}")
    raise UserError(f"{text!r} is no point of this sweep; {choices(text, [point.id for point in points])}")


def _resubmit(sweep: Path, changes: Sequence[str], only_failed: bool) -> int:
    from launchers.slurm import resubmit

    standings = {"failed"} if only_failed else {"failed", "stopped", "cancelled", "lost", "incomplete"}
    arrays = resubmit(sweep, standings, dict(_parse(change) for change in changes))
    if not arrays:
        print(f"nothing to submit: no point is {', '.join(sorted(standings))}")
        return 0
    for array in arrays:
        print(f"{len(array.points)} points in the queue, as job {array.job}")
    print(f"now: python -m launchers status {sweep}")
    return 0


def _parse(change: str) -> tuple[str, Any]:
    key, separator, value = change.partition("=")
    if not separator:
        raise UserError(f"{change!r}: write KEY=VALUE, for example mem_gb=64")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _cancel(sweep: Path, texts: Sequence[str]) -> int:
    from launchers import cluster, states

    points = states.look(sweep)
    if texts:
        points = [_find_point(points, text) for text in texts]
    live = [point for point in points if point.state in states.OPEN and point.job]
    here = sum(point.state == "running" and not point.job for point in points)
    if here:
        raise UserError(f"{here} points run without SLURM; press Ctrl-C where the sweep was started")
    # Whole arrays where nothing is spared: one request each instead of one per point.
    jobs = [point.job if texts or point.array is None else point.array.job or "" for point in live]
    cluster.cancel(list(dict.fromkeys(jobs)))
    print(f"cancelled {len(live)} of {len(points)} points")
    return 0
