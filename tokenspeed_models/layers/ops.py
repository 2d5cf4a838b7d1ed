"""Names of ops and dtypes as layers pass them to `BuildContext.op`."""

from __future__ import annotations

import torch

from tokenspeed_core.api import BuildContext


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as op problems spell it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def quantized_op(build: BuildContext, op: str) -> str:
    """Return the op that the quantization method uses in place of `op`, or `op` if there is none."""
    return op if build.quantization is None else build.quantization.fused.get(op, op)
