"""A known response surface: what pass@1 would be at a compute, an update fraction and a policy size. No torch.

    z(rho)   = log(rho / (1 - rho)),  z* = z(optimum) + optimum_per_decade log10(C / half(N))
    gain     = (ceiling + ceiling_per_decade log10(N / size) - start) / (1 + (half(N) / C)^steepness)
    half(N)  = half (N / size)^half_power
    value    = start + gain max(0, 1 - curvature (z(rho) - z*)^2)

The sigmoid in C is the one that `analysis` fits. Larger policies end higher and need more compute, so each budget has
a best size; in logit(rho) the value is a parabola, whose curvature 0 is a plateau.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from race_sweeps.config import ResponseConfig


def logit(rho: float) -> float:
    return math.log(rho / (1 - rho))


@dataclass(frozen=True)
class Response:
    """The surface at one policy size (parameters). `shift`: added to the best logit(rho), for another objective."""

    config: ResponseConfig
    parameters: float
    shift: float = 0.0

    @property
    def half(self) -> float:
        """Compute (FLOPs) that goes half of the way."""
        return self.config.half * float((self.parameters / self.config.size) ** self.config.half_power)

    def optimum(self, compute: float) -> float:
        """The best update fraction at `compute` FLOPs."""
        best = logit(self.config.optimum) + self.config.optimum_per_decade * math.log10(compute / self.half)
        return 1 / (1 + math.exp(-best - self.shift))

    def value(self, compute: float, rho: float | None) -> float:
        """The true value, between 0 and 1, after `compute` FLOPs at `rho`; before training where `compute` is 0."""
        config = self.config
        if compute <= 0 or rho is None:
            return config.start
        decades = math.log10(self.parameters / config.size)
        gain = config.ceiling + config.ceiling_per_decade * decades - config.start
        gain /= 1 + math.pow(self.half / compute, config.steepness)
        beside = logit(rho) - logit(self.optimum(compute))
        return min(1.0, max(0.0, config.start + gain * max(0.0, 1 - config.curvature * beside**2)))
