"""Block-scaled (MXFP8, NVFP4) mixture of experts with the Triton kernels of `experts_kernel`.

Token-expert pairs are sorted by expert, so that a tile uses the weights of one expert. Grids are upper bounds, so CUDA
graphs may replay it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.linear.block_scaled import (
    BLOCK_K,
    BLOCK_N,
    MXFP8,
    NVFP4,
    Format,
    Tiling,
)
from tokenspeed_kernels_blackwell.linear.quantize import Quantized, mxfp8_rows, nvfp4_rows
from tokenspeed_kernels_blackwell.moe import experts_kernel as kernel

# For up to `block_t` pairs per expert on average; the last also for more.
TILINGS = (Tiling(16, 4, 4), Tiling(64, 4, 4), Tiling(128, 8, 4))


@dataclass(frozen=True, slots=True)
class Weight:
    """Weights of all experts [E, O, I], their group scales, and a per-tensor scale per expert (NVFP4 only)."""

    codes: Tensor
    scale: Tensor
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """How to quantize activations, and their per-tensor scale (NVFP4 only)."""

    quantize: Callable[[Tensor], Quantized]
    factor: Tensor | None = None


def moe_experts_mxfp8(problem: Problem) -> Callable[..., Tensor]:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`.

    See the op's contract for shapes. x may be strided on T; everything else is contiguous.
    """
    num_experts: int = problem["num_experts"]

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        rows = Rows(mxfp8_rows)
        first, second = Weight(gate_up, gate_up_scale), Weight(down, down_scale)
        return _run(MXFP8, num_experts, x, rows, first, rows, second, weights, ids)

    return experts


def moe_experts_nvfp4(problem: Problem) -> Callable[..., Tensor]:
    """Return `experts(x, x_scale, gate_up, gate_up_scale, gate_up_factor, hidden_scale, down, ...) -> y [T, N]`.

    See the op's contract for all arguments. x may be strided on T; everything else is contiguous.
    """
    num_experts: int = problem["num_experts"]

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
        first = Rows(lambda rows: nvfp4_rows(rows, x_scale), x_scale)
        second = Rows(lambda rows: nvfp4_rows(rows, hidden_scale), hidden_scale)
        up, out = (
            Weight(gate_up, gate_up_scale, gate_up_factor),
            Weight(down, down_scale, down_factor),
        )
        return _run(NVFP4, num_experts, x, first, up, second, out, weights, ids)

    return experts


def _run(
    form: Format,
    num_experts: int,
    x: Tensor,
    x_rows: Rows,
    gate_up: Weight,
    hidden_rows: Rows,
    down: Weight,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """Return y [T, N] of x's dtype. The hidden state stays float32 until it is quantized, as the contract requires."""
    (num_tokens, size), (_, top_k) = x.shape, ids.shape
    inner, num_pairs = gate_up.codes.shape[1] // 2, ids.numel()
    if num_pairs == 0:
        return torch.zeros((num_tokens, size), dtype=x.dtype, device=x.device)
    pairs, ends = _sort(ids, num_experts)
    average = num_pairs / num_experts
    tiling = next((each for each in TILINGS if average <= each.block_t), TILINGS[-1])
    num_tiles = num_pairs // tiling.block_t + min(num_experts, num_pairs)
    tile = {
        "E": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "FORMAT": form.name,
        "PACKED": form.packed,
        "GROUP": form.group,
        "HAS_FACTORS": gate_up.factor is not None,
        "BLOCK_N": BLOCK_N,
        "BLOCK_T": tiling.block_t,
        "BLOCK_K": BLOCK_K,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    hidden = torch.empty((num_pairs, inner), dtype=torch.float32, device=x.device)
    kernel.gate_up[(triton.cdiv(inner, BLOCK_N), num_tiles)](
        *x_rows.quantize(x),
        gate_up.codes,
        gate_up.scale,
        x_rows.factor,
        gate_up.factor,
        hidden,
        pairs,
        ends,
        TOP_K=top_k,
        N=inner,
        K=size,
        **tile,
    )
    # Rows of pairs without an expert stay zero.
    scaled = torch.zeros((num_tokens, top_k, size), dtype=x.dtype, device=x.device)
    kernel.down[(triton.cdiv(size, BLOCK_N), num_tiles)](
        *hidden_rows.quantize(hidden),
        down.codes,
        down.scale,
        hidden_rows.factor,
        down.factor,
        scaled,
        pairs,
        ends,
        weights,
        N=size,
        K=inner,
        **tile,
    )
    return scaled.sum(dim=1)


def _sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return pairs (indices into flattened ids) sorted by expert, and the end of each expert's run, int32 [E].

    Pairs without an expert have an id of E and come last.
    """
    of_expert, pairs = ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    return pairs, torch.searchsorted(of_expert, experts, right=True, out_int32=True)
