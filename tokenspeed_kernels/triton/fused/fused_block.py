"""All that stands between two layers' attention, for up to 64 rows, as one persistent kernel.

Launched one by one, its four products and two norms spend most of their time in starting, draining and waiting for the
first bytes of a weight. Here programs stay, meet at barriers, and have the next weight on its way while they wait.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fused_linear import FusedBlock
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.fused.fused_block_kernel import NUM_PHASES, between
from tokenspeed_kernels.triton.pdl import supports_pdl

MAX_ROWS = 64
MAX_PROGRAMS = (
    128  # and at most one a multiprocessor, so that all of them run at once, as barriers need
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Features that a program computes of each product, how many programs share a sum, and features and loads a turn.

    Named by the product: O is attention's output, G gate and up (each so many), D down, Q the next queries, keys
    and values. Blocks are the next powers of two.
    """

    O_N: int
    O_SPLIT: int
    O_K: int
    G_N: int
    G_BLOCK: int
    G_K: int
    G_STAGES: int
    D_N: int
    D_SPLIT: int
    D_K: int
    Q_N: int
    Q_BLOCK: int
    Q_K: int
    STAGES: int
    num_warps: int


def tiling(heads: int, hidden: int, inner: int, out_size: int, programs: int) -> Tiling:
    """Return tiles that give every program one of each product where they can, as an H200 was found to be fastest with.

    `benchmarks/LOG.md` has the others that were tried, for hidden sizes of 1,024 and 4,096.
    """
    n, least, stages, warps = (32, 64, 8, 4) if hidden <= 1024 else (64, 128, 6, 8)
    turns = [least if size % least == 0 else 64 for size in (heads, hidden, inner)]
    most = max(1, programs // triton.cdiv(hidden, n))
    splits = [_split(size, turn, most) for size, turn in ((heads, turns[0]), (inner, turns[2]))]
    g_n, q_n = _share(inner, programs, 128), _share(out_size, programs, 64)
    g_block, q_block = max(16, triton.next_power_of_2(g_n)), max(16, triton.next_power_of_2(q_n))
    return Tiling(
        n,
        splits[0],
        turns[0],
        g_n,
        g_block,
        64,
        {128: 4, 64: 6}.get(g_block, 8),
        n,
        splits[1],
        turns[2],
        q_n,
        q_block,
        turns[1],
        stages,
        warps,
    )


def _share(size: int, programs: int, most: int) -> int:
    """Return how many of `size` features a program takes at once: all programs as many, at most `most`."""
    num: int = triton.cdiv(size, programs * triton.cdiv(size, programs * most))
    return num


def _split(size: int, turn: int, most: int) -> int:
    """Return how many programs share a sum over `size` features in whole turns: at most `most`."""
    return next(split for split in (4, 2, 1) if split <= most and size % (split * turn) == 0)


def fused_block(problem: Problem) -> FusedBlock:
    """Return `apply(x, residual, out, norm, gate_up, down, next_norm, qkv, eps) -> (y [T, O], total [T, H])`.

    Memory between its phases is allocated here, once: calls must not overlap.
    """
    heads, hidden = problem["in_size"], problem["hidden_size"]
    inner, out_size = problem["intermediate_size"], problem["out_size"]
    pdl, is_device = supports_pdl(), torch.cuda.is_available()
    processors = (
        torch.cuda.get_device_properties().multi_processor_count if is_device else MAX_PROGRAMS
    )
    programs = min(MAX_PROGRAMS, processors)
    tiles = tiling(heads, hidden, inner, out_size, programs)
    device, dtype = torch.device("cuda" if is_device else "cpu"), getattr(torch, problem["dtype"])
    rows = problem["max_rows"]
    sums = torch.empty(
        max(tiles.O_SPLIT, tiles.D_SPLIT) * rows * hidden, dtype=torch.float32, device=device
    )
    normed, middle = torch.empty((2, rows, hidden), dtype=dtype, device=device)
    gated = torch.empty((rows, inner), dtype=dtype, device=device)
    counter = torch.zeros(1, dtype=torch.uint32, device=device)
    # Without a device programs run one after another, and would wait for ever at a barrier.
    spans = (
        ((0, NUM_PHASES - 1),)
        if is_device
        else tuple((phase, phase) for phase in range(NUM_PHASES))
    )

    def apply(
        x: Tensor,
        residual: Tensor,
        out: Tensor,
        norm_weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        next_norm_weight: Tensor,
        qkv: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        num_rows = x.shape[0]
        y, total = x.new_empty((num_rows, out_size)), x.new_empty((num_rows, hidden))
        for first, last in spans if num_rows else ():
            between[(programs,)](
                x,
                residual,
                out,
                norm_weight,
                gate_up,
                down,
                next_norm_weight,
                qkv,
                sums,
                normed,
                middle,
                gated,
                total,
                y,
                counter,
                x.stride(0),
                residual.stride(0),
                num_rows,
                eps,
                H=hidden,
                A=heads,
                M=inner,
                Q=out_size,
                BLOCK_T=MAX_ROWS,
                BLOCK_H=triton.next_power_of_2(hidden),
                FIRST=first,
                LAST=last,
                PROGRAMS=programs,
                PDL=pdl,
                launch_pdl=pdl,
                launch_cooperative_grid=is_device,
                **asdict(tiles),
            )
        return y, total

    blank = partial(precompile.blank, problem["dtype"])
    precompile.compile_for(
        apply,
        blank(1, heads),
        blank(1, hidden),
        blank(hidden, heads),
        blank(hidden),
        blank(2 * inner, hidden),
        blank(hidden, inner),
        blank(hidden),
        blank(out_size, hidden),
        0.0,
    )
    return apply
