"""The op `moe_logits`: router logits y [T, E] = x [T, N] @ weight [E, N].T in float32.

For few tokens a program multiplies the weight row of an expert on the CUDA cores. For many, bfloat16 tokens are
multiplied on the matrix units with the weight as a sum of three bfloat16 terms, which hold its 24 bits, so that every
product is exact. cuBLAS multiplies tokens of other dtypes.
"""

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
SMALL_TILES = 512  # tokens for which tiles of 16 are used, to have enough of them
BLOCK_E = 32  # experts of a tile


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


@precompile.jit(do_not_specialize=["num_tokens"])
def _many_logits(
    x_ptr,
    w_ptr,
    y_ptr,
    num_tokens,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [T, E] = x @ w.T for x in bfloat16 and w in float32. Grid (tiles of E, tiles of T)."""
    token = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < E)[:, None]
    x_ptrs = x_ptr + token[:, None] * x_stride + k[None, :]
    w_ptrs = w_ptr + expert[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inside = (k < K - start)[None, :]
        x = tl.load(x_ptrs + start, mask=is_token & inside, other=0.0)
        w = tl.load(w_ptrs + start, mask=is_expert & inside, other=0.0)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(low), acc)
        acc = tl.dot(x, tl.trans(middle), acc)
        acc = tl.dot(x, tl.trans(high), acc)
    at = y_ptr + token[:, None] * E + expert[None, :]
    tl.store(at, acc, mask=is_token & (expert < E)[None, :])


def moe_logits(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `logits(x [T, N], weight float32 [E, N]) -> y float32 [T, E]`. Rows of x may be strided."""
    num_experts, size, pdl = problem["num_experts"], problem["hidden_size"], supports_pdl()
    block_k, is_bfloat16 = triton.next_power_of_2(size), problem["dtype"] == "bfloat16"
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
        if num_tokens > MAX_FEW_TOKENS and not is_bfloat16:
            return torch.mm(x.to(torch.float32), weight.t())
        y = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
        if num_tokens > MAX_FEW_TOKENS:
            block_m = 16 if num_tokens <= SMALL_TILES else 64
            grid = triton.cdiv(num_experts, BLOCK_E), triton.cdiv(num_tokens, block_m)
            _many_logits[grid](
                *(x, weight, y, num_tokens, x.stride(0)),
                E=num_experts,
                K=size,
                BLOCK_M=block_m,
                BLOCK_E=BLOCK_E,
                BLOCK_K=128,
                num_warps=4,
                num_stages=3,
            )
        elif num_tokens:
            _logits[(num_experts, num_tokens)](x, weight, y, x.stride(0), **settings)
        return y

    for num_tokens in (1, SMALL_TILES, SMALL_TILES + 1) if is_bfloat16 else (1,):
        precompile.compile_for(
            logits,
            precompile.blank(problem["dtype"], num_tokens, size),
            precompile.blank("float32", num_experts, size),
        )
    return logits
