"""Names of ops and dtypes as layers pass them to `BuildContext.op`."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as op problems spell it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
