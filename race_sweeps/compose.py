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
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, OmegaConf, ValueNode
from omegaconf.errors import OmegaConfBaseException, ValidationError

from race_sweeps import config as schema
from race_sweeps.config import RunConfig
from race_sweeps.errors import UserError, choices

CONFIG_NAME = "config"
for group, node in ((None, schema.defaults()), ("data", schema.defaults(schema.DataConfig))):
    ConfigStore.instance().store(name="schema", group=group, node=node, provider="race_sweeps")


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
        points = [(tuple(lines), composer.config(lines)) for lines in grid]
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


@dataclass
class _Base:
    """One set of group choices, composed: the typed tree, the text of its interpolations, and, where it is complete
    without further values, its configuration."""

    tree: DictConfig
    interpolations: str
    config: RunConfig | None


class _Composer:
    """Composes points, once per distinct set of group choices, and parses each override once."""

    def __init__(self, parser: OverridesParser, hydra_lines: list[str]) -> None:
        self.parser = parser
        self.hydra_lines = hydra_lines
        self.repository = GlobalHydra.instance().config_loader().repository  # type: ignore[attr-defined]
        self.groups: dict[str, bool] = {}
        self.parsed: dict[str, Override] = {}
        self.bases: dict[tuple[str, ...], _Base] = {}

    def config(self, lines: list[str]) -> RunConfig:
        """The configuration of one point. Plain values go straight into a copy of the base; whatever else Hydra's
        grammar allows (new keys, lists, values that interpolations read) goes through Hydra's own code."""
        overrides = [self._parse(line) for line in lines]
        base = self._base(tuple(_line(o) for o in overrides if self._is_group(o)))
        values = [o for o in overrides if not self._is_group(o)]
        config = self._set(base, values)
        if config is None:
            config = schema.from_typed(self._apply(base.tree, values))
        else:
            schema.check(config)
        return _with_absolute_data(config)

    def _parse(self, line: str) -> Override:
        if line not in self.parsed:
            self.parsed[line] = self.parser.parse_override(line)
        return self.parsed[line]

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self.groups:
            self.groups[key] = bool(self.repository.group_exists(key))
        return self.groups[key]

    def _base(self, group_lines: tuple[str, ...]) -> _Base:
        if group_lines not in self.bases:
            tree = schema.typed(compose(CONFIG_NAME, [*self.hydra_lines, *group_lines]))
            try:
                config = schema.from_typed(tree)
            except UserError:  # incomplete or wrong without the point's values
                config = None
            self.bases[group_lines] = _Base(tree, " ".join(_interpolations(tree)), config)
        return self.bases[group_lines]

    @staticmethod
    def _set(base: _Base, values: list[Override]) -> RunConfig | None:
        """The base with plain values set; None where Hydra has to do it."""
        config = base.config
        for override in values:
            key, value = override.key_or_group, override.value()
            if override.type != OverrideType.CHANGE or override.package or key in base.interpolations or config is None:
                return None
            *parents, leaf = key.split(".")
            parent = OmegaConf.select(base.tree, ".".join(parents)) if parents else base.tree
            node = parent._get_node(leaf) if isinstance(parent, DictConfig) and leaf in parent else None
            if not isinstance(node, ValueNode) or isinstance(node, AnyNode) or not isinstance(value, int | float | str):
                return None
            try:
                config = _replaced(config, (*parents, leaf), node.validate_and_convert(value))
            except ValidationError:
                return None  # again through Hydra, for an error that names the field
        return config

    @staticmethod
    def _apply(tree: DictConfig, values: list[Override]) -> DictConfig:
        composed = copy.deepcopy(tree)
        for override in values:
            if override.is_delete():
                raise UserError(f"{_line(override)}: every key has its use; set a value instead")
        ConfigLoaderImpl._apply_overrides_to_config(values, composed)
        if any(o.is_add() or o.is_force_add() for o in values):  # may have slipped past the schema
            return schema.typed(OmegaConf.to_container(composed))  # type: ignore[arg-type]
        return composed


def _interpolations(tree: DictConfig) -> Iterator[str]:
    raw = OmegaConf.to_container(tree, resolve=False)
    stack: list[Any] = [raw]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            stack += item.values() if isinstance(item, dict) else item
        elif isinstance(item, str) and "${" in item:
            yield item


def _replaced(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy of nested dataclasses and dictionaries with one value changed; what lies beside the path is shared."""
    changed = copy.copy(config)
    if isinstance(config, dict):
        changed[path[0]] = _replaced(config[path[0]], path[1:], value) if len(path) > 1 else value
    else:
        setattr(changed, path[0], _replaced(getattr(config, path[0]), path[1:], value) if len(path) > 1 else value)
    return changed


def _with_absolute_data(config: RunConfig) -> RunConfig:
    """Workers may run elsewhere: make the paths of data files absolute, and be sure that they exist."""
    for place in (("data",), *(("eval", "sets", name) for name in config.eval.sets)):
        data = config.data if place == ("data",) else config.eval.sets[place[-1]]
        if data.path is None or data.kind != "file":
            continue
        path = Path(data.path).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"{'.'.join(place)}.path={data.path}: no such file")
        config = _replaced(config, (*place, "path"), str(path))
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
