"""Exact FLOP accounting; importing it does not import torch."""

from race_sweeps.flops.policy import Flops, PolicyFlops
from race_sweeps.flops.reward import RewardFlops
from race_sweeps.flops.shape import ModelShape, pairs

__all__ = ["Flops", "ModelShape", "PolicyFlops", "RewardFlops", "pairs"]
