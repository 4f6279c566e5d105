"""A user's own reward, named by its dotted path."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from race_sweeps.errors import UserError
from race_sweeps.rewards.base import Batch, Scores


class Custom:
    """Calls `function` (`package.module.name`): takes a `Batch`, returns `Scores` or one number per completion.

    Raises `UserError` when it cannot be imported, or returns something else.
    """

    def __init__(self, function: str, name: str = "custom") -> None:
        self.path, self.name = function, name
        self.function = imported(function)

    def __call__(self, batch: Batch) -> Scores:
        result = self.function(batch)
        scores = result if isinstance(result, Scores) else Scores(self._numbers("values", result))
        columns = {"values": scores.values, **scores.components}
        checked = {name: self._numbers(name, column) for name, column in columns.items()}
        for name, column in checked.items():
            if len(column) != len(batch):
                self._refuse(f"{name}: {len(column)} for {len(batch)} completions; return one number for each")
        return replace(scores, values=checked.pop("values"), components=checked)

    def _numbers(self, name: str, column: Any) -> list[float]:
        try:
            numbers = [float(value) for value in column]
        except (TypeError, ValueError):
            self._refuse(f"{name}: a {type(column).__name__}; return rewards.Scores, or one number per completion")
        for place, number in enumerate(numbers):
            if not math.isfinite(number):
                self._refuse(f"{name}: {number} for completion {place}; return finite numbers")
        return numbers

    def _refuse(self, what: str) -> Any:
        raise UserError(f"reward.function={self.path}: returned {what}")


def imported(path: str) -> Callable[[Batch], Any]:
    """The callable at a dotted path. Raises `UserError`."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # also whatever the user's module raises while it is imported
        what = f"{type(error).__name__}: {error}" if module else "no module in it"
        raise UserError(
            f"reward.function={path}: cannot be imported ({what}); give the dotted path of a function on the Python "
            "path, for example my_rewards.length (PYTHONPATH=. for the current folder)"
        ) from None
    if not callable(found):
        raise UserError(f"reward.function={path}: a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]
