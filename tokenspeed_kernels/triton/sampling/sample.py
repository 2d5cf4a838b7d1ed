"""The ops `greedy` and `sample`, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.sampling import kernel

Sample = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

BLOCK = 2048
MAX_PARTS = 32  # programs per row
CAPACITY = 16384  # most tokens in the head of a row
ENOUGH = 0.9999  # probability that the head should hold; one row in 10,000 then needs a full search


def greedy(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `greedy(logits [S, V]) -> ids int64 [S]`; the lowest id among equal logits."""
    size: int = problem["vocab_size"]
    block = min(BLOCK, triton.next_power_of_2(size))
    part = block * triton.cdiv(triton.cdiv(size, block), MAX_PARTS)
    num_parts = triton.cdiv(size, part)

    def argmax(logits: Tensor) -> Tensor:
        num_rows = logits.shape[0]
        values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
        parts = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
        ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows:
            kernel.greedy_parts[(num_rows, num_parts)](
                logits, values, parts, logits.stride(0), V=size, PART=part, BLOCK=block, num_warps=8
            )
            kernel.greedy_merge[(num_rows,)](
                values,
                parts,
                ids,
                NUM_PARTS=num_parts,
                BLOCK=triton.next_power_of_2(num_parts),
                V=size,
                num_warps=1,
            )
        return ids

    precompile.compile_for(argmax, precompile.blank(problem["dtype"], 1, size))
    return argmax


def sample(problem: Problem) -> Sample:
    """Return `sample(logits [S, V], temperature, top_k, top_p, min_p, seeds, positions) -> ids int64 [S]`.

    The algorithm is described in `kernel`.
    """
    size: int = problem["vocab_size"]
    block = min(1024, triton.next_power_of_2(size))
    part = block * triton.cdiv(triton.cdiv(size, block), MAX_PARTS)
    num_parts = triton.cdiv(size, part)
    parted = {
        "V": size,
        "BLOCK": block,
        "NUM_PARTS": num_parts,
        "BLOCK_PARTS": triton.next_power_of_2(num_parts),
    }

    def sample_rows(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        num_rows, device, stride = logits.shape[0], logits.device, logits.stride(0)
        ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        if num_rows == 0:
            return ids
        grid = (num_rows, num_parts)
        parts = torch.empty(grid, dtype=torch.float32, device=device)
        counts = torch.empty((*grid, 8), dtype=torch.int32, device=device)
        masses = torch.empty((*grid, 8), dtype=torch.float32, device=device)
        values = torch.empty((num_rows, CAPACITY), dtype=torch.float32, device=device)
        head_ids = torch.empty((num_rows, CAPACITY), dtype=torch.int32, device=device)
        sizes = torch.empty(num_rows, dtype=torch.int32, device=device)
        kernel.highest_of_parts[grid](logits, parts, stride, V=size, PART=part, BLOCK=block)
        kernel.tally[grid](
            logits, temperature, parts, counts, masses, stride, PART=part, num_warps=8, **parted
        )
        kernel.gather_head[grid](
            logits,
            temperature,
            top_k,
            parts,
            counts,
            masses,
            values,
            head_ids,
            sizes,
            stride,
            PART=part,
            CAPACITY=CAPACITY,
            ENOUGH=ENOUGH,
            **parted,
        )
        kernel.sample[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            parts,
            masses,
            values,
            head_ids,
            sizes,
            ids,
            stride,
            CAPACITY=CAPACITY,
            num_warps=16,
            **{**parted, "BLOCK": 2 * block},
        )
        return ids

    logits, floats = precompile.blank("float32", 1, size), precompile.blank("float32", 1)
    ints, longs = precompile.blank("int32", 1), precompile.blank("int64", 1)
    precompile.compile_for(sample_rows, logits, floats, ints, floats, floats, longs, longs)
    return sample_rows
