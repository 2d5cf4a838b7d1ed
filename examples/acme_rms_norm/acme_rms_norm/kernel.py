"""RMS norm in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem


def rms_norm(problem: Problem) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return the op for a problem. Called once per layer when the model is built."""
    del problem  # one implementation fits all sizes and dtypes

    def call(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize the last dimension of x [..., N] in float32, then scale by weight [N]."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    return call
