"""Exact FLOP accounting; importing it does not import torch."""

from race_sweeps.flops.policy import Flops, PolicyFlops, pairs
from race_sweeps.flops.shape import ModelShape

__all__ = ["Flops", "ModelShape", "PolicyFlops", "pairs"]
