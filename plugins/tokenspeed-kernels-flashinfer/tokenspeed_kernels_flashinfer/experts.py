"""Experts with FlashInfer's CUTLASS kernels: sorting of tokens, two grouped GEMMs, SiLU and the weighted sum."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem


class CutlassExperts:
    """Runs the library's `cutlass_fused_moe` for one problem.

    The library reads the up projection before the gate, so `prepare_weights` exchanges them. Its first call also lets
    the library measure which tiles are fastest for each number of tokens.
    """

    def __init__(self, problem: Problem) -> None:
        self._run = import_module("flashinfer.fused_moe").cutlass_fused_moe
        self._autotune = import_module("flashinfer").autotune
        self._top_k, self._is_prepared = problem["top_k"], False

    def prepare_weights(self, gate_up: Tensor, down: Tensor) -> None:
        """Exchange gate and up of all experts in place, for gate_up [E, 2I, N] and down [E, N, I]."""
        for expert in gate_up:
            gate, up = expert.chunk(2)
            kept = gate.clone()
            gate.copy_(up)
            up.copy_(kept)
        if not self._is_prepared:
            self._is_prepared = True
            # One token is enough: the library makes the inputs of its measurements.
            ids = torch.arange(self._top_k, dtype=torch.int32, device=down.device).unsqueeze(0)
            with self._autotune():
                self(down.new_zeros((1, down.shape[1])), gate_up, down, ids.float(), ids)

    def __call__(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
    ) -> Tensor:
        """Return y [T, N]; shapes as in the contract of `moe_experts`.

        Allocates the library's workspace. Raises RuntimeError if no weights were prepared.
        """
        if not self._is_prepared:
            raise RuntimeError(
                "the weights of experts are not in FlashInfer's order. Call prepare_weights after loading them."
            )
        if not len(x):
            return torch.empty_like(x)
        # The library takes no strides. It skips experts outside of the weights, so an id of E means no expert.
        y: Tensor = self._run(
            x.contiguous(), ids, weights, gate_up, down, x.dtype, quant_scales=None
        )
        return y


def moe_experts(problem: Problem) -> CutlassExperts:
    """Return `experts(x, gate_up, down, weights, ids) -> y [T, N]` for prepared weights. Raises ImportError."""
    return CutlassExperts(problem)
