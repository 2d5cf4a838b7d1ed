"""Block-scaled (MXFP8, NVFP4) mixture of experts in plain torch, the reference on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.linear.reference import (
    mxfp8_rows,
    mxfp8_values,
    nvfp4_rows,
    nvfp4_values,
)


def moe_experts_mxfp8(problem: Problem) -> Callable[..., Tensor]:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`.

    Dequantizes the weights at each call, and synchronizes with the device to find the experts that have tokens.
    """
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        x = mxfp8_values(*mxfp8_rows(x))
        for expert, tokens, weight in _with_tokens(ids, weights, len(down)):
            both = functional.linear(
                x[tokens], mxfp8_values(gate_up[expert], gate_up_scale[expert])
            )
            hidden = mxfp8_values(*mxfp8_rows(_silu_mul(both)))
            product = functional.linear(hidden, mxfp8_values(down[expert], down_scale[expert]))
            y.index_add_(0, tokens, product * weight)
        return y.to(dtype)

    return experts


def moe_experts_nvfp4(problem: Problem) -> Callable[..., Tensor]:
    """Return `experts(x, x_scale, gate_up, gate_up_scale, gate_up_factor, hidden_scale, down, ...) -> y [T, N]`.

    Like `moe_experts_mxfp8`; see the op's contract for all arguments.
    """
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def experts(
        x: Tensor,
        x_scale: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_factor: Tensor,
        hidden_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        down_factor: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        x = nvfp4_values(*nvfp4_rows(x, x_scale))
        for expert, tokens, weight in _with_tokens(ids, weights, len(down)):
            both = functional.linear(
                x[tokens], nvfp4_values(gate_up[expert], gate_up_scale[expert])
            )
            hidden = _silu_mul(both * (x_scale * gate_up_factor[expert]))
            hidden = nvfp4_values(*nvfp4_rows(hidden, hidden_scale))
            product = functional.linear(hidden, nvfp4_values(down[expert], down_scale[expert]))
            y.index_add_(0, tokens, product * (hidden_scale * down_factor[expert]) * weight)
        return y.to(dtype)

    return experts


def _with_tokens(
    ids: Tensor, weights: Tensor, num_experts: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that has tokens, with the tokens int64 [t] and their routing weights [t, 1].

    An id of `num_experts` means no expert.
    """
    for expert in sorted(set(ids.flatten().tolist()) - {num_experts}):
        tokens, rank = torch.nonzero(ids == expert, as_tuple=True)
        yield expert, tokens, weights[tokens, rank].unsqueeze(1)


def _silu_mul(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up
