"""The op `fused_block` for up to 64 rows, as one persistent kernel (a "layer megakernel").

It computes everything between the attention of two layers: output projection, residual add and norm, MLP, residual
add and norm, and the QKV projection of the next layer. Launched separately, these four GEMMs and two norms spend most
of their time starting, draining and waiting for the first bytes of a weight. Here the programs stay resident, meet at
grid-wide barriers, and load the next weight while they wait.
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
from tokenspeed_kernels.triton.fused.fused_block_kernel import NUM_PHASES, fused_block_kernel
from tokenspeed_kernels.triton.pdl import supports_pdl

MAX_ROWS = 64
# Programs; also at most one per multiprocessor, because the barriers need all of them to run at the same time.
MAX_PROGRAMS = 128


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes, by GEMM: O output projection, G gate and up, D down, Q the next layer's QKV projection.

    _N: output features per program (for G: of each of gate and up). _BLOCK: the next power of two. _K: input features
    per iteration. _SPLIT: programs that split the input features. STAGES: pipeline stages.
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
    """Return the tiling that was fastest on an H200 for hidden sizes of 1,024 and 4,096.

    It gives each program one tile of each GEMM where possible. `benchmarks/LOG.md` lists the alternatives.
    """
    n, block_k, stages, warps = (32, 64, 8, 4) if hidden <= 1024 else (64, 128, 6, 8)
    o_k, q_k, d_k = (block_k if size % block_k == 0 else 64 for size in (heads, hidden, inner))
    max_split = max(1, programs // triton.cdiv(hidden, n))
    g_n = _tile_size(inner, programs, 128)
    q_n = _tile_size(out_size, programs, 64)
    g_block = max(16, triton.next_power_of_2(g_n))
    return Tiling(
        O_N=n,
        O_SPLIT=_num_splits(heads, o_k, max_split),
        O_K=o_k,
        G_N=g_n,
        G_BLOCK=g_block,
        G_K=64,
        G_STAGES={128: 4, 64: 6}.get(g_block, 8),
        D_N=n,
        D_SPLIT=_num_splits(inner, d_k, max_split),
        D_K=d_k,
        Q_N=q_n,
        Q_BLOCK=max(16, triton.next_power_of_2(q_n)),
        Q_K=q_k,
        STAGES=stages,
        num_warps=warps,
    )


def _tile_size(size: int, programs: int, max_size: int) -> int:
    """Return the tile size, at most `max_size`, that spreads `size` features evenly over the programs."""
    num: int = triton.cdiv(size, programs * triton.cdiv(size, programs * max_size))
    return num


def _num_splits(size: int, block_k: int, max_split: int) -> int:
    """Return how many programs split a sum over `size` features into whole blocks, at most `max_split`."""
    return next(
        split for split in (4, 2, 1) if split <= max_split and size % (split * block_k) == 0
    )


def fused_block(problem: Problem) -> FusedBlock:
    """Return `apply(x, residual, out, norm, gate_up, down, next_norm, qkv, eps) -> (y [T, O], total [T, H])`.

    The buffers between its phases are allocated here, once, so calls must not overlap.
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
    # Under the interpreter programs run one after another and would deadlock at a barrier: launch phase by phase.
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
            fused_block_kernel[(programs,)](
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
