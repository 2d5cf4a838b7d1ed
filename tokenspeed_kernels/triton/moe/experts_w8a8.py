"""FP8 (e4m3) and INT8 mixture of experts: grouped GEMMs over tokens sorted by expert.

Scales are per-channel for weights and per-token or static for activations, or block-wise: 128 x 128 for weights and
1 x 128 for activations. As in `gemm_fp8`, the weight is the wide side of a tile, and an expert's few tokens are the
narrow side. A separate launch quantizes the hidden state, because its scales depend on many features. Pairs of few tokens
are not sorted (see `few_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fp8 import Quantize, QuantizeStatic
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe.experts import (
    add_up,
    blank_routings,
    new_tiles,
    run_down,
    run_gate_up,
    sort_by_expert,
)
from tokenspeed_kernels.triton.moe.few_tokens import FewTokens
from tokenspeed_kernels.triton.moe.scales import Scales
from tokenspeed_kernels.triton.moe.tilings import (
    Tiling,
    fitting_tilings,
    tiling_for,
)
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP, quantize_fp8_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_fp8
from tokenspeed_kernels.triton.quantize.integer import (
    quantize_fp8_static,
    quantize_int8,
    quantize_int8_static,
)

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ExpertsStatic = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
]


def moe_experts_fp8(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`; shapes as in the contract.

    x may be strided on T; everything else is contiguous. Grids are upper bounds, so CUDA graphs may replay it.
    """
    return _per_channel(problem, "moe_experts_fp8", "float8_e4m3fn", quantize_fp8)


def moe_experts_int8(problem: Problem) -> Experts:
    """Return the experts with INT8 weights and activations; otherwise as `moe_experts_fp8`."""
    return _per_channel(problem, "moe_experts_int8", "int8", quantize_int8)


def moe_experts_fp8_static(problem: Problem) -> ExpertsStatic:
    """Return `experts(x, gate_up_input, gate_up, …scale, down_input, down, …scale, weights, ids) -> y [T, N]`.

    `gate_up_input` and `down_input` are the scales of the activations. Otherwise as `moe_experts_fp8`.
    """
    return _per_channel_static(problem, "moe_experts_fp8", "float8_e4m3fn", quantize_fp8_static)


def moe_experts_int8_static(problem: Problem) -> ExpertsStatic:
    """Return the experts with INT8 weights and activations; otherwise as `moe_experts_fp8_static`."""
    return _per_channel_static(problem, "moe_experts_int8", "int8", quantize_int8_static)


def moe_experts_fp8_block(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`, with block-wise scales.

    Otherwise as `moe_experts_fp8`.
    """
    runner = _Experts(problem, "moe_experts_fp8_block", "block")
    experts = _dynamic(problem, runner, quantize_fp8_groups)
    size, inner = triton.cdiv(problem["hidden_size"], GROUP), problem["intermediate_size"] // GROUP
    runner.precompile(experts, "float8_e4m3fn", (2 * inner, size), (size, inner))
    return experts


def _per_channel(
    problem: Problem, tuned: str, dtype: str, make_quantize: Callable[[Problem], Quantize]
) -> Experts:
    runner = _Experts(problem, tuned, "channel")
    experts = _dynamic(problem, runner, make_quantize)
    runner.precompile(experts, dtype, (2 * runner.inner, 1), (runner.size, 1))
    return experts


def _dynamic(
    problem: Problem, runner: _Experts, make_quantize: Callable[[Problem], Quantize]
) -> Experts:
    """Return the function that runs the experts; it computes the scales of their inputs."""
    quantize_tokens = make_quantize({**problem, "size": runner.size})
    quantize_hidden = make_quantize({**problem, "size": runner.inner})

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return runner(
            (x, weights, ids),
            (gate_up, gate_up_scale, quantize_tokens),
            (down, down_scale, quantize_hidden),
        )

    return experts


def _per_channel_static(
    problem: Problem, tuned: str, dtype: str, make_quantize: Callable[[Problem], QuantizeStatic]
) -> ExpertsStatic:
    """Return the function that runs the experts; the scales of their inputs are arguments."""
    runner = _Experts(problem, tuned, "channel")
    quantize_tokens = make_quantize({**problem, "size": runner.size})
    quantize_hidden = make_quantize({**problem, "size": runner.inner})

    def experts(
        x: Tensor,
        gate_up_input: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down_input: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return runner(
            (x, weights, ids),
            (gate_up, gate_up_scale, lambda rows: quantize_tokens(rows, gate_up_input)),
            (down, down_scale, lambda rows: quantize_hidden(rows, down_input)),
        )

    runner.precompile(experts, dtype, (2 * runner.inner, 1), (runner.size, 1), is_static=True)
    return experts


class _Experts:
    """Launches the kernels for one kind of scales, with the tilings of the op `tuned`.

    With block-wise scales, `block_k` of a tiling is the side of a block, and `columns` divides it, so that a tile of
    the weight has one scale per iteration. Partial results need registers, so that tiles are smaller.
    """

    def __init__(self, problem: Problem, tuned: str, kind: str) -> None:
        self._problem, self._kind = problem, kind
        self._few_tokens = FewTokens(problem, kind)
        self._tilings = fitting_tilings(tuned_tilings(tuned, Tiling.of), itemsize=1)
        self._num_experts, self._top_k = problem["num_experts"], problem["top_k"]
        self.size, self.inner = problem["hidden_size"], problem["intermediate_size"]

    def __call__(
        self,
        routed: tuple[Tensor, Tensor, Tensor],
        gate_up: tuple[Tensor, Tensor, Quantize],
        down: tuple[Tensor, Tensor, Quantize],
    ) -> Tensor:
        """Return y [T, N] for x, routing weights and ids.

        A weight comes with its scales and the function that quantizes its inputs.
        """
        x, weights, ids = routed
        num_pairs, num_experts = ids.numel(), self._num_experts
        if num_pairs == 0:
            return torch.empty((x.shape[0], self.size), dtype=x.dtype, device=x.device)
        codes, scale, quantize = gate_up
        inputs, input_scale = quantize(x)
        up_scales = Scales(self._kind, input_scale, scale, x.dtype)
        down_codes, down_scale, quantize_hidden = down
        if num_pairs <= self._few_tokens.max_pairs:
            hidden = self._few_tokens.run_gate_up(inputs, codes, ids, up_scales)
            inputs, input_scale = quantize_hidden(hidden)
            down_scales = Scales(self._kind, input_scale, down_scale, x.dtype)
            return self._few_tokens.run_down(inputs, down_codes, weights, ids, down_scales)
        tiling = tiling_for(num_pairs / num_experts, self._tilings)
        tiles = new_tiles(ids, num_experts, tiling.block_m)
        pairs, _ = sort_by_expert(ids, num_experts, tiles, tiling.block_m)
        hidden = run_gate_up(tiling, inputs, codes, pairs, tiles, self._top_k, scales=up_scales)
        inputs, input_scale = quantize_hidden(hidden)
        down_scales = Scales(self._kind, input_scale, down_scale, x.dtype)
        scaled = run_down(tiling, inputs, down_codes, pairs, tiles, weights, scales=down_scales)
        return add_up(scaled, ids, num_experts)

    def precompile(
        self,
        experts: Callable[..., Tensor],
        dtype: str,
        gate_up_scale: tuple[int, int],
        down_scale: tuple[int, int],
        *,
        is_static: bool = False,
    ) -> None:
        """Compile the kernels of every tiling, for scales of the given shapes per expert."""
        num_experts, size, inner = self._num_experts, self.size, self.inner
        codes, scales = partial(precompile.blank, dtype), partial(precompile.blank, "float32")
        given = (scales(1),) if is_static else ()
        weights = (
            *given,
            codes(num_experts, 2 * inner, size),
            scales(num_experts, *gate_up_scale),
            *given,
            codes(num_experts, size, inner),
            scales(num_experts, *down_scale),
        )
        bounds = [bound for bound, _ in self._tilings[:-1]]
        next_few = self._few_tokens.max_pairs // self._top_k + 1
        for num_tokens, *routing in blank_routings(self._problem, bounds, next_few):
            x = precompile.blank(self._problem["dtype"], num_tokens, size)
            precompile.compile_for(experts, x, *weights, *routing)
