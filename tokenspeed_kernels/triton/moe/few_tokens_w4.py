"""Experts with 4-bit weights for few tokens: two GEMVs without sorting, as in `few_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.w4a16 import MX_GROUP
from tokenspeed_kernels.triton.moe import few_tokens, few_tokens_w4_kernel
from tokenspeed_kernels.triton.moe.few_tokens_w4_kernel import RUN
from tokenspeed_kernels.triton.pdl import supports_pdl


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight of all experts. Shapes are those of the contracts of the ops."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None
    bias: Tensor | None = None


class FewTokensW4:
    """The experts of one problem, for up to `max_pairs` pairs of a token and an expert.

    `kind` is "int4" for `moe_experts_w4a16`, and "mxfp4" for `moe_experts_mxfp4` and `moe_biased_experts_mxfp4`, whose
    weights have a bias.
    """

    def __init__(self, problem: Problem, kind: str) -> None:
        top_k = problem["top_k"]
        size, inner = problem["hidden_size"], problem["intermediate_size"]
        group = MX_GROUP if kind == "mxfp4" else problem["group_size"]
        up, down = few_tokens.few_tilings(problem, kind)
        self.max_pairs = few_tokens.max_pairs(problem, kind)
        self._size, self._inner = size, inner
        self._up_tiles = triton.cdiv(inner, up.block_n)
        self._down_tiles = triton.cdiv(size, down.block_n)
        pdl = supports_pdl()
        common = {
            "E": problem["num_experts"],
            "TOP_K": top_k,
            "IS_E2M1": kind == "mxfp4",
            "PDL": pdl,
            "launch_pdl": pdl,
        }
        self._gate_up = {
            **common,
            "ALPHA": problem.get("alpha"),
            "LIMIT": problem.get("limit"),
            "N": inner,
            "K": size,
            "GROUP": group or size,
            "BLOCK_N": up.block_n,
            "BLOCK_R": _num_runs(size),
            "num_warps": up.num_warps,
        }
        self._down = {
            **common,
            "BLOCK_J": triton.next_power_of_2(top_k),
            "N": size,
            "K": inner,
            "GROUP": group or inner,
            "BLOCK_N": down.block_n,
            "BLOCK_R": _num_runs(inner),
            "num_warps": down.num_warps,
        }

    def __call__(
        self, x: Tensor, gate_up: PackedWeight, down: PackedWeight, weights: Tensor, ids: Tensor
    ) -> Tensor:
        """Return y [T, N]. Only rows of x may be strided."""
        hidden = torch.empty((ids.numel(), self._inner), dtype=x.dtype, device=x.device)
        few_tokens_w4_kernel.gate_up[(self._up_tiles, ids.numel())](
            x,
            gate_up.codes,
            gate_up.scale,
            gate_up.zero,
            gate_up.order,
            gate_up.bias,
            ids,
            hidden,
            x.stride(0),
            **self._gate_up,
        )
        y = torch.empty((len(ids), self._size), dtype=x.dtype, device=x.device)
        few_tokens_w4_kernel.down[(self._down_tiles, len(ids))](
            hidden,
            down.codes,
            down.scale,
            down.zero,
            down.order,
            down.bias,
            ids,
            weights,
            y,
            **self._down,
        )
        return y


def _num_runs(columns: int) -> int:
    """Return the runs of a weight row, padded."""
    return triton.next_power_of_2(columns // RUN.value)
