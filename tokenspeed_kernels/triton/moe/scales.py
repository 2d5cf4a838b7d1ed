"""The scales of quantized experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a GEMM's 8-bit inputs and weight, float32, and the dtype of its result.

    `kind` is "channel" or "block" (see `gemm_kernel`).
    """

    kind: str
    inputs: Tensor
    weight: Tensor
    dtype: torch.dtype
