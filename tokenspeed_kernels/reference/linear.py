"""Matrix products of activations with weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem


def linear(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]`: torch's own, on every device."""
    del problem  # torch's product takes every size and dtype
    return functional.linear
