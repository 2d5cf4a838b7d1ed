"""The ops `mla_absorb` and `mla_project`: a GEMM per head before and after absorbed attention.

These kernels are for few tokens. More tokens use torch's batched GEMM. Weights are loaded before the wait for the
previous kernel (see `pdl`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference import mla as reference
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tokens of a program, its output features, and warps."""

    block_t: int
    columns: int
    num_warps: int


MAX_FEW_TOKENS = 64
MAX_ABSORBED_TOKENS = 512
FEW, MANY = Tiling(16, 64, 4), Tiling(64, 128, 8)
PROJECT = Tiling(16, 16, 4)


@precompile.jit(do_not_specialize=["num_tokens"])
def _absorb(
    q_ptr,
    weight_ptr,
    y_ptr,
    num_tokens,
    q_stride_t,
    q_stride_h,
    weight_stride_h,
    weight_stride_n,
    H: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, H, L + R]: q[..., :N] @ weight, then q[..., N:]. weight [H, N, L]. Grid (H, tiles of L, tiles of T)."""
    head = tl.program_id(0)
    feature, column = tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    weight = tl.load(
        weight_ptr + head * weight_stride_h + feature[:, None] * weight_stride_n + column[None, :],
        mask=(feature < N)[:, None] & (column < L)[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = (token < num_tokens)[:, None]
    q_row = (q_ptr + token * q_stride_t + head * q_stride_h)[:, None]
    y_row = (y_ptr + (token * H + head) * (L + R))[:, None]
    q = tl.load(q_row + feature[None, :], mask=there & (feature < N)[None, :], other=0.0)
    y = tl.dot(q, weight, input_precision=PRECISION)
    tl.store(
        y_row + column[None, :], y.to(y_ptr.dtype.element_ty), mask=there & (column < L)[None, :]
    )
    if tl.program_id(1) == 0:
        rope = tl.arange(0, BLOCK_R)
        kept = there & (rope < R)[None, :]
        rotated = tl.load(q_row + N + rope[None, :], mask=kept)
        tl.store(y_row + L + rope[None, :], rotated, mask=kept)


@precompile.jit(do_not_specialize=["num_tokens"])
def _project(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    x_stride_t,
    x_stride_h,
    weight_stride_h,
    weight_stride_v,
    out_stride_t,
    out_stride_h,
    L: tl.constexpr,
    V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, H, V] = x [T, H, L] @ weight [H, V, L].T. Grid (H, tiles of V, tiles of T)."""
    head = tl.program_id(0)
    feature, column = tl.arange(0, BLOCK_L), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    weight = tl.load(
        weight_ptr + head * weight_stride_h + column[:, None] * weight_stride_v + feature[None, :],
        mask=(column < V)[:, None] & (feature < L)[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = (token < num_tokens)[:, None]
    x = tl.load(
        (x_ptr + token * x_stride_t + head * x_stride_h)[:, None] + feature[None, :],
        mask=there & (feature < L)[None, :],
        other=0.0,
    )
    y = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    out = (out_ptr + token * out_stride_t + head * out_stride_h)[:, None] + column[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=there & (column < V)[None, :])


def mla_absorb(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `absorb(q [T, H, N + R], kv_up [H, N + V, L]) -> y [T, H, L + R]`."""
    heads, latent_size = problem["num_heads"], problem["latent_size"]
    nope_size, rope_size = problem["nope_size"], problem["rope_size"]
    many, settings = reference.mla_absorb(problem), _settings(problem)
    large = MANY if problem["dtype"] != "float32" else FEW

    def absorb(q: Tensor, kv_up: Tensor) -> Tensor:
        num_tokens = q.shape[0]
        if num_tokens > MAX_ABSORBED_TOKENS:
            return many(q, kv_up)
        y = q.new_empty((num_tokens, heads, latent_size + rope_size))
        tiling = FEW if num_tokens <= MAX_FEW_TOKENS else large
        tiles = triton.cdiv(latent_size, tiling.columns), triton.cdiv(num_tokens, tiling.block_t)
        grid = (heads, *tiles)
        if num_tokens:
            _absorb[grid](
                q,
                kv_up,
                y,
                num_tokens,
                *q.stride()[:2],
                *kv_up.stride()[:2],
                H=heads,
                N=nope_size,
                L=latent_size,
                R=rope_size,
                BLOCK_D=_block(nope_size),
                BLOCK_R=_block(rope_size),
                BLOCK_L=tiling.columns,
                BLOCK_T=tiling.block_t,
                num_warps=tiling.num_warps,
                **settings,
            )
        return y

    for num_tokens in (1, MAX_ABSORBED_TOKENS):
        q = precompile.blank(problem["dtype"], num_tokens, heads, nope_size + rope_size)
        precompile.compile_for(absorb, q, _blank_expansion(problem))
    return absorb


def mla_project(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return `project(x [T, H, L], kv_up [H, N + V, L], out [T, H, V]) -> None`."""
    heads, latent_size = problem["num_heads"], problem["latent_size"]
    nope_size, value_size = problem["nope_size"], problem["value_size"]
    many, settings = reference.mla_project(problem), _settings(problem)

    def project(x: Tensor, kv_up: Tensor, out: Tensor) -> None:
        num_tokens = x.shape[0]
        if num_tokens > MAX_FEW_TOKENS:
            many(x, kv_up, out)
            return
        tiles = triton.cdiv(value_size, PROJECT.columns), triton.cdiv(num_tokens, PROJECT.block_t)
        grid = (heads, *tiles)
        if num_tokens:
            _project[grid](
                x,
                kv_up[:, nope_size:],
                out,
                num_tokens,
                *x.stride()[:2],
                *kv_up.stride()[:2],
                *out.stride()[:2],
                L=latent_size,
                V=value_size,
                BLOCK_L=_block(latent_size),
                BLOCK_V=PROJECT.columns,
                BLOCK_T=PROJECT.block_t,
                num_warps=PROJECT.num_warps,
                **settings,
            )

    x = precompile.blank(problem["dtype"], 1, heads, latent_size)
    out = precompile.blank(problem["dtype"], 1, heads, value_size)
    precompile.compile_for(project, x, _blank_expansion(problem), out)
    return project


def _settings(problem: Problem) -> dict[str, Any]:
    pdl = supports_pdl()
    return {
        "PRECISION": "ieee" if problem["dtype"] == "float32" else "tf32",
        "PDL": pdl,
        "launch_pdl": pdl,
    }


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _blank_expansion(problem: Problem) -> torch.Tensor:
    rows = problem["nope_size"] + problem["value_size"]
    shape = (problem["num_heads"], rows, problem["latent_size"])
    return precompile.blank(problem["dtype"], *shape)
