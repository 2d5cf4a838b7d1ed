"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Rows from which oneDNN's float32 GEMM is faster than MKL's: 1.3 times, 2.2 times at 512 rows (on Zen 5).
_ONEDNN_ROWS = 8


def linear(problem: Problem) -> Linear:
    """Return `linear(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]`.

    On CPUs torch uses MKL for float32, which is slow on processors other than Intel's, and oneDNN for other dtypes.
    Here many float32 rows use oneDNN too, if this build of torch has it.
    """
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_onednn = is_built and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return _linear_float32 if problem["dtype"] == "float32" and has_onednn else functional.linear


def _linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type != "cpu" or x.shape[0] < _ONEDNN_ROWS:
        return functional.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
