"""Matrix products of activations with weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_ONEDNN_ROWS = 8  # from which oneDNN's float32 product pays: 1.3 times MKL's speed, 2.2 times at 512 rows (Zen 5)


def linear(problem: Problem) -> Linear:
    """Return `linear(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]`, torch's own on every device.

    In float32 on the CPU torch asks MKL, which is slow on processors of other makers, and oneDNN for other
    types; many rows go to oneDNN in float32 too, where this torch has it.
    """
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_onednn = is_built and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return _linear_float32 if problem["dtype"] == "float32" and has_onednn else functional.linear


def _linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type != "cpu" or x.shape[0] < _ONEDNN_ROWS:
        return functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
