"""Where rows go. A sink is opened for one attempt; what an earlier attempt left is continued or built again."""

from __future__ import annotations

import netrc
import os
import shutil
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from race_sweeps.config import TrackingConfig
from race_sweeps.errors import UserError
from race_sweeps.folder import RunFolder, write_atomic
from race_sweeps.tracking.rows import EXACT_TOTAL, STEP, X_AXIS, Identity, StepRow

TEXT_LIMIT = 10_000  # characters of a completion in a table


class Sink(Protocol):
    """`after`: the last step it already holds, -1 for none; `total`: its exact C_total there."""

    after: int
    total: str | None

    def write(self, row: StepRow) -> None: ...

    def finish(self, complete: bool) -> None: ...


def open_sink(config: TrackingConfig, folder: RunFolder, run: Identity) -> Sink:
    """Open the sink that `config.kind` names. Raises `UserError` when its package is not installed."""
    if config.kind == "wandb":
        return WandbSink(config, folder, run)
    if config.kind == "tensorboard":
        return TensorboardSink(folder, run)
    raise ValueError(config.kind)


def wandb_key_is_set() -> bool:
    """Whether W&B has credentials: WANDB_API_KEY, or the netrc entry that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_mode(config: TrackingConfig) -> str:
    """`online` or `offline`."""
    if config.mode != "auto":
        return config.mode
    return "online" if os.environ.get("WANDB_MODE", "online") == "online" and wandb_key_is_set() else "offline"


class WandbSink:
    """W&B. The ledger's step is also W&B's own step, so that a row can't be shown twice: the server's last step says
    where to go on, and W&B refuses a step that goes back. An offline run is written anew from the first step: one file
    per point, whole, that replaces what it is uploaded over."""

    def __init__(self, config: TrackingConfig, folder: RunFolder, run: Identity) -> None:
        self.folder, self.online = folder, wandb_mode(config) == "online"
        _keep_inside(folder)
        try:
            import wandb
        except ImportError:
            raise UserError('wandb is not installed; pip install "race-sweeps[wandb]"') from None
        self._table = wandb.Table
        if not self.online:
            for old in (folder.path / "wandb").glob("offline-run-*"):
                shutil.rmtree(old)
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            id=run.id,
            name=f"{'SIMULATED ' * run.config['simulated']}{run.tags[0]} {run.tags[2]} seed {run.config['seed']}",
            group=run.group,
            job_type=run.job_type,
            tags=run.tags,
            config=run.config,
            dir=folder.path,
            mode="online" if self.online else "offline",
            resume="allow" if self.online else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                # No command lines, patches or host data: they may hold secrets. The revision is in the configuration.
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self.run.define_metric(X_AXIS)
        self.run.define_metric("*", step_metric=X_AXIS)
        self.after = self.run.starting_step - 1 if self.online else -1  # the server's last step
        self.total = self.run.summary.get(EXACT_TOTAL) if self.after >= 0 else None

    def write(self, row: StepRow) -> None:
        values: dict[str, Any] = dict(row.values)
        if row.rollouts is not None:
            cut = {k: [v[:TEXT_LIMIT] if isinstance(v, str) else v for v in c] for k, c in row.rollouts.items()}
            data = [list(items) for items in zip(*cut.values(), strict=True)]
            values["rollouts"] = self._table(columns=list(cut), data=data)
        self.run.log(values, step=row.step)

    def finish(self, complete: bool) -> None:
        self.run.finish(exit_code=0 if complete else 1)
        if complete and self.online:
            mark_uploaded(self.folder)


def offline_file(folder: RunFolder) -> Path | None:
    """The `.wandb` file of the point's offline run."""
    return next(folder.path.glob("wandb/offline-run-*/run-*.wandb"), None)


def mark_uploaded(folder: RunFolder) -> None:
    """Remember that the server has everything up to this result."""
    write_atomic(folder.path / "wandb" / "uploaded", folder.result.read_text(encoding="utf-8"))


def is_uploaded(folder: RunFolder) -> bool:
    """Whether the server was given this very result's run."""
    mark = folder.path / "wandb" / "uploaded"
    return mark.is_file() and mark.read_bytes() == folder.result.read_bytes()


def _keep_inside(folder: RunFolder) -> None:
    """W&B stages tables under the home folder; a run's folder must be complete when it is copied elsewhere."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        os.environ[name] = str(folder.path / "wandb" / "staged")
    (folder.path / "wandb").mkdir(exist_ok=True)


class TensorboardSink:
    """TensorBoard event files, written anew by each attempt. Its x-axis can only be an integer step: the ledger's.
    Values are stored as doubles; exact integers as text."""

    def __init__(self, folder: RunFolder, run: Identity) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UserError("tensorboard is not installed; pip install tensorboard") from None
        import json

        target = folder.path / "tensorboard"
        shutil.rmtree(target, ignore_errors=True)
        self.writer = EventFileWriter(str(target))
        self.after, self.total = -1, None  # type: int, str | None
        self._add(0, {"config": json.dumps(run.config, indent=1)})

    def write(self, row: StepRow) -> None:
        values = {key: value for key, value in row.values.items() if key != STEP}
        if row.rollouts is not None:
            first = {column: str(items[0])[:TEXT_LIMIT] for column, items in row.rollouts.items() if items}
            values |= {f"rollout/{column}": text for column, text in first.items()}
        self._add(row.step, values)

    def _add(self, step: int, values: dict[str, float | int | str]) -> None:
        import time

        import numpy as np
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.util.tensor_util import make_tensor_proto

        def value(tag: str, content: float | int | str) -> Any:
            plugin = "text" if isinstance(content, str) else "scalars"
            # Text is shown as Markdown: indented, it is code, whatever a model wrote.
            data: Any = "    " + content.replace("\n", "\n    ") if isinstance(content, str) else np.float64(content)
            metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
            return Summary.Value(tag=tag, tensor=make_tensor_proto(data), metadata=metadata)

        summary = Summary(value=[value(tag, content) for tag, content in values.items()])
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def finish(self, complete: bool) -> None:
        self.writer.close()
