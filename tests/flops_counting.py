"""Torch's own count of what runs, made comparable with the executed convention.

FlopCounterMode counts nothing inside fused CPU attention, so what is counted here must use eager attention. Two of its
rules are changed, and they are the whole difference to our convention:

- the in-place `addmm_`, with which TRL's fused head accumulates its gradients, is unknown to it: taught here;
- a batched outer product (inner size 1) is how transformers makes the rotary embedding's table of angles, which the
  convention puts at 0 with the rest of the embedding; no other product of these models has inner size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _product(into: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * int(a[0] * a[1] * b[1])


def _batched(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 0 if a[2] == 1 else 2 * int(a[0] * a[1] * a[2] * b[2])


def counted(work: Callable[[], Any]) -> int:
    """FLOPs of the matrix products that `work` runs, forward and backward."""
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.addmm_: _product, torch.ops.aten.bmm: _batched}
    )
    with counter:
        work()
    return int(counter.get_total_flops())
