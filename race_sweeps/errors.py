"""Errors a user can act on: one line, no traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class UserError(Exception):
    """A mistake in the user's input. The message is one line: what is wrong, where, what would work.

    Command lines print it without a traceback and exit with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def exit_status(program: str, run: Callable[[], int]) -> int:
    """Run a command line and return its exit status: a user's mistake is one line and 2, Ctrl-C one line and 130, a
    closed pipe (`... | head`) nothing and 0."""
    try:
        return run()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on from what is there", file=sys.stderr)
        return 130


def choices(name: str, valid: Iterable[str]) -> str:
    """`nearest: x; valid: a, b, c` for an error about `name`; the nearest match only where one is close."""
    options = [str(v) for v in valid]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}valid: {', '.join(options)}"


def refuse_unknown_command(arguments: Iterable[str], commands: Iterable[str]) -> None:
    """Raise `UserError` when the first word that is no option is none of `commands`, with the nearest of them."""
    valid = list(commands)
    first = next((a for a in arguments if not a.startswith("-")), None)
    if first is not None and first not in valid:
        raise UserError(f"command {first!r}: {choices(first, valid)}")


class Busy(Exception):
    """Another process is working in this run folder."""


class Stopped(Exception):
    """The run was asked to end early; it checkpointed and can be resumed."""
