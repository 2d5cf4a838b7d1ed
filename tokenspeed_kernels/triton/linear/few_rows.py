"""Linear layers for 2 to 8 tokens, as in steps that verify the draft tokens of a sequence.

With so few tokens a linear layer is bound by reading its weight, as for one token (`gemv`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fused_linear import AddNormLinear
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear.few_rows_kernel import few_rows
from tokenspeed_kernels.triton.norm.rms_norm import sum_rms_norm
from tokenspeed_kernels.triton.pdl import supports_pdl

MAX_ROWS = 8
# Of a weight with more rows, torch's GEMM reads more per second.
MAX_OUT_SIZE = 65536


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a program.

    It has `block_n` rows of the weight (pairs of gate and up rows if gated). A chunk has 32 features per warp and step;
    `num_fetched` chunks after the first are prefetched into the L2 cache before the input is available.
    """

    block_n: int
    steps: int
    num_warps: int
    num_fetched: int = 0


def few_rows_tiling(in_size: int, *, gated: bool = False) -> Tiling:
    """Return the tiling: up to eight warps, with 16 loads of 16 bytes per thread in flight."""
    num_warps = max(1, min(8, triton.next_power_of_2(in_size) // 256))
    return Tiling(16, 4 if gated else 8, num_warps, num_fetched=1)


def linear(
    problem: Problem, *, gated: bool = False, is_gelu: bool = False
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x [T, I], weight [O or 2O, I], bias | None) -> y [T, O]` for T up to MAX_ROWS."""
    in_size, out_size = problem["in_size"], problem["out_size"]
    tiling, pdl = few_rows_tiling(in_size, gated=gated), supports_pdl()

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty((x.shape[0], out_size))
        multiply(x, weight, bias, y, tiling, gated=gated, is_gelu=is_gelu, pdl=pdl)
        return y

    blank = partial(precompile.blank, problem["dtype"])
    weight = blank(2 * out_size if gated else out_size, in_size)
    precompile.compile_for(apply, blank(MAX_ROWS, in_size), weight, None)
    return apply


def add_rms_norm_linear(
    problem: Problem, *, gated: bool = False, is_gelu: bool = False
) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [O or 2O, I], bias) -> (y [T, O], x + residual)`.

    The norm is a kernel of its own: computed by each program it would take longer than reading the weight. The weights
    are loaded meanwhile.
    """
    norm = sum_rms_norm({"size": problem["in_size"], "dtype": problem["dtype"]})
    product = linear(problem, gated=gated, is_gelu=is_gelu)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = norm(x, residual, norm_weight, eps)
        return product(normed, weight, bias), total

    return apply


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    tiling: Tiling,
    *,
    gated: bool = False,
    is_gelu: bool = False,
    pdl: bool = False,
) -> None:
    """Write y [T, O] = x [T, I] @ weight.T for T <= 16, weight [O or 2O, I], with the given gating.

    Last dimensions are contiguous, and y is. With `pdl` the kernel may start before the previous one has finished.
    """
    num_rows, in_size = x.shape
    out_size = y.shape[1]
    few_rows[(triton.cdiv(out_size, tiling.block_n),)](
        x,
        weight,
        bias,
        y,
        x.stride(0),
        weight.stride(0),
        num_rows,
        out_size,
        K=in_size,
        GATED=gated,
        IS_GELU=is_gelu,
        HAS_BIAS=bias is not None,
        BLOCK_T=8 if num_rows <= 8 else 16,
        BLOCK_N=tiling.block_n,
        STEPS=tiling.steps,
        WARPS=tiling.num_warps,
        FETCHED=tiling.num_fetched,
        PDL=pdl,
        num_warps=tiling.num_warps,
        num_stages=1,
        launch_pdl=pdl,
    )
