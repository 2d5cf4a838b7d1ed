"""Experts with block-wise FP8 weights: two grouped GEMMs of DeepGEMM (Zhao et al., 2025).

Pairs of a token and an expert get rows, so that each tile of ROWS_PER_TILE rows belongs to one expert. The number of
tiles is an upper bound that depends on shapes alone, so CUDA graphs may replay it; the library skips tiles without
rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton.quantize.fp8_per_group import (
    quantize_fp8_groups,
    silu_mul_fp8_groups,
)
from tokenspeed_kernels_deepgemm.linear import COMPILES_S, GROUP, LIBRARY, MAX_ROWS

ROWS_PER_TILE = 128  # the library's alignment of groups on Hopper

log = logging.getLogger("tokenspeed.kernels")

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Multiplies the rows of a with the weights b of each row's expert, and writes d.
Grouped = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor, Tensor], None]


def moe_experts_fp8_block(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`.

    Raises ImportError without the library.
    """
    multiply = import_module(LIBRARY).m_grouped_fp8_gemm_nt_contiguous
    num_experts, top_k = problem["num_experts"], problem["top_k"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    quantize = quantize_fp8_groups({**problem, "size": size})
    gate = silu_mul_fp8_groups({**problem, "size": inner})

    def grouped(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, owners: Tensor
    ) -> None:
        # Scales are any float32, not powers of two.
        multiply(a, b, d, owners, disable_ue8m0_cast=True)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return x.new_empty((0, size))
        rows, owners = place(ids, num_experts)
        tokens = torch.arange(num_tokens, device=x.device).repeat_interleave(top_k)
        # Pairs without an expert have the row after the last one.
        tokens = owners.new_zeros(len(owners) + 1, dtype=torch.int64).scatter_(0, rows, tokens)[:-1]
        codes, scale = quantize(x)
        # PyTorch cannot index 8-bit floats.
        codes = codes.view(torch.uint8).index_select(0, tokens).view(codes.dtype)
        both = x.new_empty((len(owners), 2 * inner))
        grouped((codes, scale.index_select(0, tokens)), (gate_up, gate_up_scale), both, owners)
        out = x.new_empty((len(owners), size))
        grouped(gate(both), (down, down_scale), out, owners)
        return add_up(out, rows, weights)

    if torch.cuda.is_available():
        max_tiles = MAX_ROWS * top_k // ROWS_PER_TILE + num_experts
        for in_size, out_size in ((size, 2 * inner), (inner, size)):
            compile_grouped(grouped, num_experts, in_size, out_size, max_tiles)
    return experts


def add_up(out: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return y [T, N]: the rows, int64 [T k], of `out` [M, N] times the weights [T, k], added up; row M is zero."""
    chosen = out.index_select(0, rows.clamp(max=len(out) - 1)).to(torch.float32)
    chosen.masked_fill_((rows == len(out)).unsqueeze(1), 0.0)
    chosen = chosen.view(*weights.shape, out.shape[1])
    return (chosen * weights.unsqueeze(2)).sum(dim=1).to(out.dtype)


def place(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the row of each pair, int64 [T k], and the expert of each row, int32 [M], -1 for rows without a pair.

    The row of pairs without an expert is M.
    """
    flat = ids.flatten().to(torch.int64)
    num_pairs = len(flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + ROWS_PER_TILE - 1) // ROWS_PER_TILE
    # Rows before each expert's first one, less the pairs before its first one.
    shift = (tiles.cumsum(0) - tiles) * ROWS_PER_TILE - (counts.cumsum(0) - counts)
    owners, order = flat.sort(stable=True)
    sorted_rows = torch.arange(num_pairs, device=ids.device) + shift.index_select(0, owners)
    num_rows = (num_pairs // ROWS_PER_TILE + min(num_experts, num_pairs)) * ROWS_PER_TILE
    sorted_rows.masked_fill_(owners == num_experts, num_rows)
    of_rows = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=ids.device)
    of_rows.scatter_(0, sorted_rows, owners.to(torch.int32))
    return torch.empty_like(flat).scatter_(0, order, sorted_rows), of_rows[:-1]


def compile_grouped(
    grouped: Grouped,
    num_experts: int,
    in_size: int,
    out_size: int,
    max_tiles: int,
    device: str = "cuda",
) -> None:
    """Call `grouped` for every number of tiles, so that no request waits for the compiler.

    Only the first tile has rows, so that the calls cost little. The library caches kernels on disk.
    """
    num_rows = max_tiles * ROWS_PER_TILE
    a = torch.zeros((num_rows, in_size), dtype=torch.float8_e4m3fn, device=device)
    a_scale = torch.ones((num_rows, in_size // GROUP), device=device)
    b = torch.zeros((num_experts, out_size, in_size), dtype=torch.float8_e4m3fn, device=device)
    b_scale = torch.ones((num_experts, out_size // GROUP, in_size // GROUP), device=device)
    d = torch.empty((num_rows, out_size), dtype=torch.bfloat16, device=device)
    owners = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    owners[:ROWS_PER_TILE] = 0
    begin = time.monotonic()
    is_logged = False
    for end in range(ROWS_PER_TILE, num_rows + 1, ROWS_PER_TILE):
        grouped((a[:end], a_scale[:end]), (b, b_scale), d[:end], owners[:end])
        if not is_logged and time.monotonic() - begin > COMPILES_S:
            is_logged = True
            text = "DeepGEMM is compiling kernels for %d experts, in_size=%d, out_size=%d; this takes up to a minute the first time"
            log.info(text, num_experts, in_size, out_size)
