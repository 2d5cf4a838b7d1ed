"""The ops `moe_route` and `moe_experts`: routing in one launch, and grouped GEMMs over tokens sorted by expert.

The kernels are in `kernel`, `gemm_kernel` and `tma_kernel`. The kernels for few tokens are in `few_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe import gemm_kernel, kernel, tma_kernel
from tokenspeed_kernels.triton.moe.few_tokens import FewTokens
from tokenspeed_kernels.triton.moe.scales import Scales
from tokenspeed_kernels.triton.moe.tilings import (
    Gemm,
    Tiling,
    fitting_tilings,
    supports_tma,
    tiling_for,
    without_tma,
)
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings
from tokenspeed_kernels.triton.pdl import supports_pdl

Route = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

SMALL_SORT = 4096  # one program groups up to this many token-expert pairs
CURSOR_STRIDE = 32  # integers from one expert's counter to the next one's, 128 bytes
SORT_BLOCKS = (512, 2048, SMALL_SORT)  # sizes of that program


def moe_route(problem: Problem) -> Route:
    """Return `route(logits [T, E], bias [E] | None) -> (weights float32 [T, k], ids int32 [T, k])`."""
    num_experts, top_k, num_groups = (
        problem["num_experts"],
        problem["top_k"],
        problem["num_groups"],
    )
    scale: float = problem["scale"]
    pdl = supports_pdl()
    settings = {
        "E": num_experts,
        "TOP_K": top_k,
        "BLOCK_K": triton.next_power_of_2(top_k),
        "GROUPS": num_groups,
        "BLOCK_G": triton.next_power_of_2(num_groups),
        "BLOCK_E": triton.next_power_of_2(num_experts // num_groups),
        "TOP_GROUPS": problem["top_groups"],
        "SCORE": problem["score"],
        "SUMS_TWO": problem["group_score"] == "top_2_sum",
        "RENORMALIZE": problem["renormalize"],
        "PDL": pdl,
        "num_warps": 1,
        "launch_pdl": pdl,
    }

    def route(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        num_tokens = logits.shape[0]
        weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
        ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
        if num_tokens:
            kernel.route[(num_tokens,)](
                logits, bias, weights, ids, logits.stride(0), scale, **settings
            )
        return weights, ids

    logits = precompile.blank(problem["dtype"], 1, num_experts)
    bias = precompile.blank("float32", num_experts) if problem["has_bias"] else None
    precompile.compile_for(route, logits, bias)
    return route


def moe_experts(problem: Problem) -> Experts:
    """Return `experts(x [T, N], gate_up [E, 2I, N], down [E, N, I], weights [T, k], ids [T, k]) -> y [T, N]`.

    Few tokens have separate kernels (see `few_tokens`). Otherwise token-expert pairs are sorted by expert. Grids are
    upper bounds, so CUDA graphs may replay it. The order of pairs within an expert does not affect the result: each
    pair is a separate row in the GEMMs.
    """
    num_experts, top_k = problem["num_experts"], problem["top_k"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    few_tokens, has_pdl = FewTokens(problem), supports_pdl()
    itemsize = getattr(torch, problem["dtype"]).itemsize
    tilings = fitting_tilings(tuned_tilings("moe_experts", Tiling.of), itemsize)
    if not supports_tma(itemsize, size, inner):
        tilings = without_tma(tilings)

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        num_pairs = ids.numel()
        if num_pairs == 0:
            return torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        if num_pairs <= few_tokens.max_pairs:
            hidden = few_tokens.run_gate_up(x, gate_up, ids)
            return few_tokens.run_down(hidden, down, weights, ids)
        tiling = tiling_for(num_pairs / num_experts, tilings)
        pdl = has_pdl and num_pairs <= SMALL_SORT  # larger steps do not gain from it
        tiles = new_tiles(ids, num_experts, tiling.block_m)
        pairs, _ = sort_by_expert(ids, num_experts, tiles, tiling.block_m, pdl=pdl)
        hidden = run_gate_up(tiling, x, gate_up, pairs, tiles, top_k, pdl=pdl)
        scaled = run_down(tiling, hidden, down, pairs, tiles, weights, pdl=pdl)
        return add_up(scaled, ids, num_experts, pdl=pdl)

    blank = partial(precompile.blank, problem["dtype"])
    weights = blank(num_experts, 2 * inner, size), blank(num_experts, size, inner)
    averages, next_few = [bound for bound, _ in tilings[:-1]], few_tokens.max_pairs // top_k + 1
    for num_tokens, *routing in blank_routings(problem, averages, next_few):
        precompile.compile_for(experts, blank(num_tokens, size), *weights, *routing)
    return experts


def run_gate_up(
    tiling: Tiling,
    x: Tensor,
    gate_up: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    top_k: int,
    *,
    scales: Scales | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return silu(x @ gate) * (x @ up) of the sorted pairs [P, I], for weights [E, 2I, N]."""
    num_experts, inner, size = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    dtype = x.dtype if scales is None else scales.dtype
    hidden = torch.empty((len(pairs), inner), dtype=dtype, device=x.device)
    grid = (triton.cdiv(inner, tiling.up.columns), len(tiles))
    if tiling.up.tma:
        _refuse_scales(scales)
        weight = gate_up.view(num_experts, 2, inner, size)
        block = [1, 2, tiling.up.columns, tiling.up.block_k]
        tma_kernel.gate_up[grid](
            x,
            TensorDescriptor.from_tensor(weight, block),
            hidden,
            pairs,
            tiles,
            x.stride(0),
            E=num_experts,
            TOP_K=top_k,
            N=inner,
            K=size,
            **_tile_settings(tiling, tiling.up, pdl=pdl),
        )
        return hidden
    gemm_kernel.gate_up[grid](
        x,
        None if scales is None else scales.inputs,
        gate_up,
        None if scales is None else scales.weight,
        hidden,
        pairs,
        tiles,
        x.stride(0),
        gate_up.stride(0),
        gate_up.stride(1),
        E=num_experts,
        TOP_K=top_k,
        N=inner,
        K=size,
        JOINED=tiling.up.joined,
        **_settings(tiling, tiling.up, x.dtype, scales, pdl=pdl),
    )
    return hidden


def run_down(
    tiling: Tiling,
    hidden: Tensor,
    down: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    weights: Tensor,
    *,
    scales: Scales | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return weight * hidden @ down, [P, N] in the order of tokens, for weights [E, N, I]."""
    num_experts, size, inner = down.shape
    dtype = hidden.dtype if scales is None else scales.dtype
    scaled = torch.empty((len(pairs), size), dtype=dtype, device=hidden.device)
    grid = (triton.cdiv(size, tiling.down.columns), len(tiles))
    if tiling.down.tma:
        _refuse_scales(scales)
        block_k = tiling.down.block_k
        tma_kernel.down[grid](
            hidden,
            TensorDescriptor.from_tensor(hidden, [tiling.block_m, block_k]),
            TensorDescriptor.from_tensor(down, [1, tiling.down.columns, block_k]),
            scaled,
            pairs,
            tiles,
            weights,
            E=num_experts,
            N=size,
            K=inner,
            **_tile_settings(tiling, tiling.down, pdl=pdl),
        )
        return scaled
    gemm_kernel.down[grid](
        hidden,
        None if scales is None else scales.inputs,
        down,
        None if scales is None else scales.weight,
        scaled,
        pairs,
        tiles,
        weights,
        down.stride(0),
        down.stride(1),
        E=num_experts,
        N=size,
        K=inner,
        **_settings(tiling, tiling.down, hidden.dtype, scales, pdl=pdl),
    )
    return scaled


def _refuse_scales(scales: Scales | None) -> None:
    if scales is not None:
        raise ValueError("tma requires unquantized weights")


def _settings(
    tiling: Tiling, gemm: Gemm, dtype: torch.dtype, scales: Scales | None, *, pdl: bool
) -> dict[str, Any]:
    return {
        **_tile_settings(tiling, gemm, pdl=pdl),
        "WEIGHTS_FIRST": gemm.weights_first,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "SCALES": "none" if scales is None else scales.kind,
        "MAX_INEXACT": gemm.max_inexact,
    }


def _tile_settings(tiling: Tiling, gemm: Gemm, *, pdl: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": gemm.columns,
        "BLOCK_K": gemm.block_k,
        "TOGETHER": gemm.together,
        "HALVES": tiling.halves,
        "PDL": pdl,
        "num_warps": gemm.num_warps,
        "num_stages": gemm.num_stages,
        "launch_pdl": pdl,
    }


def new_tiles(ids: Tensor, num_experts: int, block_m: int) -> Tensor:
    """Return an empty table for the tiles of pairs, int32 [tiles, 3], which `sort_by_expert` fills.

    The number of tiles is an upper bound.
    """
    num_tiles = ids.numel() // block_m + min(num_experts, ids.numel())
    return torch.empty((num_tiles, 3), dtype=torch.int32, device=ids.device)


def blank_routings(
    problem: Problem, averages: Iterable[float], *more: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (number of tokens, blank weights, blank ids) for each average of pairs, and for each way to sort pairs.

    `more` are other numbers of tokens. Many tokens come first, because their large tiles take longest to compile.
    """
    num_experts, top_k = problem["num_experts"], problem["top_k"]
    by_average = (int(each) * num_experts // top_k for each in averages)
    by_sort = (*(block // top_k for block in SORT_BLOCKS), SMALL_SORT * num_experts)
    nums = {1, *more, *by_average, *by_sort}
    for num_tokens in sorted(nums, reverse=True):
        yield (
            num_tokens,
            precompile.blank("float32", num_tokens, top_k),
            precompile.blank("int32", num_tokens, top_k),
        )


def add_up(scaled: Tensor, ids: Tensor, num_experts: int, *, pdl: bool = False) -> Tensor:
    """Return y [T, N], the sum over each token's pairs in `scaled` [T * k, N], always in the same order.

    Rows of pairs without an expert are not read.
    """
    (num_tokens, top_k), size = ids.shape, scaled.shape[1]
    y = torch.empty((num_tokens, size), dtype=scaled.dtype, device=scaled.device)
    block = min(1024, triton.next_power_of_2(size))
    kernel.add_pairs[(num_tokens, triton.cdiv(size, block))](
        *(scaled, ids, y),
        E=num_experts,
        TOP_K=top_k,
        N=size,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return y


def sort_by_expert(
    ids: Tensor,
    num_experts: int,
    tiles: Tensor | None = None,
    block_m: int = 1,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return pairs (indices into flattened ids) sorted by expert, int32 [T * k], and pairs per expert, int32 [E].

    Pairs without an expert have an id of E. They are not counted, and their places at the end have any content.
    Fills `tiles` [tiles, 3] with the expert of each tile of up to `block_m` pairs, its first pair, and the end of the
    expert's run; tiles that are left over have no expert.
    """
    num_pairs, num_tiles = ids.numel(), 0 if tiles is None else len(tiles)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    sizes = {"E": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts), "BLOCK_M": block_m}
    if num_pairs <= SMALL_SORT:
        tally = torch.empty((2, num_experts), dtype=torch.int32, device=ids.device)
        block = next(each for each in SORT_BLOCKS if num_pairs <= each)
        kernel.sort_small[(1,)](
            *(ids, pairs, tally[0], tally[1], tiles, num_pairs, num_tiles),
            **sizes,
            BLOCK=block,
            PDL=pdl,
            num_warps=min(32, block // 32),
            launch_pdl=pdl,
        )
        return pairs, tally[0]
    num_cursors = num_experts * CURSOR_STRIDE
    tally = torch.zeros(num_cursors + num_experts, dtype=torch.int32, device=ids.device)
    cursors, counts = tally[:num_cursors], tally[num_cursors:]
    grid = (triton.cdiv(num_pairs, 1024),)
    kernel.count[grid](ids, counts, num_pairs, E=num_experts, BLOCK_E=sizes["BLOCK_E"], BLOCK=1024)
    kernel.place[grid](
        *(ids, pairs, counts, cursors, tiles, num_pairs, num_tiles),
        **sizes,
        BLOCK=1024,
        CURSOR_STRIDE=CURSOR_STRIDE,
    )
    return pairs, counts
