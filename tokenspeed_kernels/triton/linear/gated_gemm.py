"""Gate and up projection with the gated activation for many tokens, as one kernel that never writes the projections.

A persistent GEMM with TMA loads, after Triton's tutorial 09. A tile holds the same columns of the gate and of the up
projection, and tiles are visited in groups that share operands in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.activation.gated import activated
from tokenspeed_kernels.triton.pdl import supports_pdl

BLOCK_T, BLOCK_N, BLOCK_K, GROUP = 128, 128, 64, 16
NUM_WARPS, NUM_STAGES = 8, 3
MIN_ROWS = 2048  # with fewer rows, the last wave of tiles leaves too much of the device idle


@precompile.jit(do_not_specialize=["T"])
def _gated(
    x_desc,
    weight_desc,
    y_desc,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Persistent: grid (NUM_PROGRAMS). x [T, K], weight [2, N, K] and y [T, N] are tensor descriptors."""
    dtype: tl.constexpr = y_desc.dtype
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_t = tl.cdiv(T, BLOCK_T)
    for tile in tl.range(tl.program_id(0), tiles_t * TILES_N, NUM_PROGRAMS, flatten=True):
        first = tile // (GROUP * TILES_N) * GROUP
        rows = min(tiles_t - first, GROUP)
        t = (first + tile % (GROUP * TILES_N) % rows) * BLOCK_T
        n = tile % (GROUP * TILES_N) // rows * BLOCK_N
        both = tl.zeros((BLOCK_T, 2 * BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            weight = weight_desc.load([0, n, k]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x_desc.load([t, k]), weight.T, both)
        gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_T, 2, BLOCK_N)), (0, 2, 1)))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        gate = activated(gate, IS_GELU).to(dtype).to(tl.float32)
        y_desc.store([t, n], (gate * up).to(dtype))


def can_gate(problem: Problem) -> bool:
    """Return whether `gated_linear` supports the problem on this device."""
    fits = (
        problem["in_size"] % 8 == 0
        and problem["out_size"] % 8 == 0
        and problem["dtype"] in ("bfloat16", "float16")
    )
    return fits and supports_pdl()  # devices with PDL have TMA too


def gated_linear(problem: Problem, *, is_gelu: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `apply(x [T, I], weight [2O, I]) -> y [T, O]`: silu(x @ gate.T) * (x @ up.T), or gelu instead of silu.

    bfloat16 or float16; compute capability 9.0 and higher; I and O are multiples of 8; T > 0. Intermediate results
    are rounded like those of the separate ops.
    """
    in_size, out_size = problem["in_size"], problem["out_size"]
    num_programs = (
        torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1
    )

    def apply(x: Tensor, weight: Tensor) -> Tensor:
        y = x.new_empty((x.shape[0], out_size))
        _gated[(num_programs,)](
            TensorDescriptor.from_tensor(x, [BLOCK_T, BLOCK_K]),
            TensorDescriptor.from_tensor(weight.view(2, out_size, in_size), [2, BLOCK_N, BLOCK_K]),
            TensorDescriptor.from_tensor(y, [BLOCK_T, BLOCK_N]),
            x.shape[0],
            N=out_size,
            K=in_size,
            BLOCK_T=BLOCK_T,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            GROUP=GROUP,
            NUM_PROGRAMS=num_programs,
            IS_GELU=is_gelu,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        return y

    blank = partial(precompile.blank, problem["dtype"])
    precompile.compile_for(apply, blank(MIN_ROWS, in_size), blank(2 * out_size, in_size))
    return apply
