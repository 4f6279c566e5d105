"""Hydra composition of grid points: Hydra's override grammar and semantics, one compose per set of group choices.

Hydra's own sweeper composes every point from scratch (tens of milliseconds each). Values (`seed=1`) are applied after
composition, in order, so points that choose the same groups share one compose; a test holds the result equal to
Hydra's own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from race_sweeps import config as schema
from race_sweeps.config import RunConfig
from race_sweeps.errors import UserError, choices

CONFIG_NAME = "config"
ConfigStore.instance().store(name="schema", node=schema.defaults(), provider="race_sweeps")


@dataclass(frozen=True)
class Composed:
    """The grid points of one command line, in sweep order, and the launcher's own configuration."""

    points: list[tuple[tuple[str, ...], RunConfig]]
    launcher: dict[str, Any]


def conf_dir() -> Path:
    """The shipped configuration: beside the package in a checkout, inside it when installed."""
    installed = Path(__file__).parent / "conf"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "conf"


def compose_points(overrides: Sequence[str], *, multirun: bool, config_dir: Path | None = None) -> Composed:
    """Compose, type and check every point of `python -m race_sweeps [-m] OVERRIDES`. Raises `UserError`."""
    with _readable_errors(), initialize_config_dir(str((config_dir or conf_dir()).absolute()), version_base="1.3"):
        parser = OverridesParser.create()
        parsed = parser.parse_overrides(list(overrides))
        swept = [o for o in parsed if o.is_sweep_override()]
        if swept and not multirun:
            raise UserError(f"{swept[0].input_line}: a sweep over several values needs -m")
        if any(o.get_key_element() == "stage" for o in swept):
            raise UserError("stage: one stage per sweep; run them one after the other")
        fixed = [_line(o) for o in parsed if not o.is_sweep_override()]
        master = compose(CONFIG_NAME, fixed, return_hydra_config=True)
        launcher = OmegaConf.to_container(master.hydra.launcher, resolve=True)
        assert isinstance(launcher, dict)
        task = [o for o in parsed if not o.is_hydra_override()]
        grid = _expand(master, parser, task) if multirun else [[_line(o) for o in task]]
        composer = _Composer(parser, [_line(o) for o in parsed if o.is_hydra_override()])
        points = [(tuple(lines), _config(composer.compose(lines))) for lines in grid]
        return Composed(points, {str(k): v for k, v in launcher.items()})


def _expand(master: DictConfig, parser: OverridesParser, task: list[Override]) -> list[list[str]]:
    """Hydra's BasicSweeper grid: the stage's `hydra.sweeper.params`, then the command line, which wins."""
    params = master.hydra.sweeper.params or {}
    lines = [f"{key}={value}" for key, value in params.items()] + [_line(o) for o in task]
    batches = BasicSweeper.split_arguments(parser.parse_overrides(lines), max_batch_size=None)
    return [list(point) for batch in batches for point in batch]


def _line(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


class _Composer:
    """Composes points, once per distinct set of group choices."""

    def __init__(self, parser: OverridesParser, hydra_lines: list[str]) -> None:
        self.parser = parser
        self.hydra_lines = hydra_lines
        self.repository = GlobalHydra.instance().config_loader().repository  # type: ignore[attr-defined]
        self.groups: dict[str, bool] = {}
        self.cache: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, lines: list[str]) -> DictConfig:
        parsed = self.parser.parse_overrides(lines)
        group_lines = tuple(_line(o) for o in parsed if self._is_group(o))
        if group_lines not in self.cache:
            self.cache[group_lines] = schema.typed(compose(CONFIG_NAME, [*self.hydra_lines, *group_lines]))
        composed = copy.deepcopy(self.cache[group_lines])
        values = [o for o in parsed if not self._is_group(o)]
        for override in values:
            if override.is_delete():
                raise UserError(f"{_line(override)}: every key has its use; set a value instead")
        ConfigLoaderImpl._apply_overrides_to_config(values, composed)
        if any(o.is_add() or o.is_force_add() for o in values):  # may have slipped past the schema
            return schema.typed(OmegaConf.to_container(composed))  # type: ignore[arg-type]
        return composed

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self.groups:
            self.groups[key] = bool(self.repository.group_exists(key))
        return self.groups[key]


def _config(composed: DictConfig) -> RunConfig:
    config = schema.from_typed(composed)
    if config.data.path is not None and config.data.kind == "file":
        path = Path(config.data.path).expanduser().absolute()  # workers may run elsewhere
        if not path.is_file():
            raise UserError(f"data.path={config.data.path}: no such file")
        config.data.path = str(path)
    return config


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Hydra's and OmegaConf's errors as one line with the nearest valid choice."""
    try:
        yield
    except HydraException as error:
        if isinstance(error.__cause__, OmegaConfBaseException) and "no such key" not in _explain(error):
            with schema.one_line_errors():
                raise error.__cause__ from None
        raise UserError(_explain(error)) from None


def _explain(error: Exception) -> str:
    text = str(error)
    if group := re.search(r"Could not find '([^']+)/([^'/]+)'\s*Available options in '[^']+':\n((?:\t.*\n?)*)", text):
        name, value, options = group.group(1), group.group(2), group.group(3).split()
        return f"{name}={value}: {choices(value, options)}"
    if key := re.search(r"Could not override '([^']+)'\.", text):
        return f"{key.group(1)}: no such key; {schema.nearest_key(key.group(1))}"
    if append := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{append.group(1)}: the key exists; leave out the '+'"
    if "mismatched input" in text or "extraneous input" in text or "no viable alternative" in text:
        return f"override not understood: {' '.join(text.splitlines()[:1])}"
    return " ".join(text.split())
