"""Router logits in float32: one launch for few tokens, cuBLAS for many."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl

MAX_FEW_TOKENS = 16  # each reads the whole weight, mostly from the L2 cache
PER_WARP = 2048  # weight elements per warp


@precompile.jit
def _logits(
    x_ptr,
    w_ptr,
    y_ptr,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, E] = x @ w.T in float32. Grid (E, T). PDL: the weight is loaded before the wait (see `pdl`)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    feature = tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + expert * K + feature, mask=feature < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + feature, mask=feature < K, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * E + expert, tl.sum(w * x, axis=0))


def moe_logits(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `logits(x [T, N], weight float32 [E, N]) -> y float32 [T, E]`. Rows of x may be strided."""
    num_experts, size, pdl = problem["num_experts"], problem["hidden_size"], supports_pdl()
    block_k = triton.next_power_of_2(size)
    settings = {
        "E": num_experts,
        "K": size,
        "BLOCK_K": block_k,
        "PDL": pdl,
        "num_warps": min(8, max(1, block_k // PER_WARP)),
        "launch_pdl": pdl,
    }

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens > MAX_FEW_TOKENS:
            return torch.mm(x.to(torch.float32), weight.t())
        y = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
        if num_tokens:
            _logits[(num_experts, num_tokens)](x, weight, y, x.stride(0), **settings)
        return y

    precompile.compile_for(
        logits,
        precompile.blank(problem["dtype"], 1, size),
        precompile.blank("float32", num_experts, size),
    )
    return logits
