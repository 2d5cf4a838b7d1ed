"""The experts function that models of transformers call: TokenSpeed's kernel where it computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import ExpertNames, Experts
from tokenspeed_models.weights import WeightSlot
from tokenspeed_models_transformers.attention import SERVE
from tokenspeed_models_transformers.compare import random_tensor, same

ExpertsForward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class MoEKernel:
    """Runs `moe_experts` on the weights of an experts module.

    Raises ValueError for a kernel that changes the layout of weights, because transformers computes with them too.
    """

    def __init__(self, build: BuildContext, module: Any, top_k: int) -> None:
        self._experts = build.op(
            "moe_experts",
            num_experts=module.down_proj.shape[0],
            top_k=top_k,
            hidden_size=module.down_proj.shape[1],
            intermediate_size=module.down_proj.shape[2],
            dtype=str(build.dtype).removeprefix("torch."),
        )
        if hasattr(self._experts, "prepare_weights"):
            raise ValueError(
                "the selected kernel of moe_experts changes the layout of weights, which models that run through "
                "transformers do not support. Choose another --moe-backend."
            )

    def __call__(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [T, hidden] of the experts `ids` [T, k] for x [T, hidden]."""
        result: Tensor = self._experts(
            x, module.gate_up_proj, module.down_proj, weights.float(), ids.int()
        )
        return result


class ExpertsLayer:
    """Replaces an experts module with TokenSpeed's layer. The module's parameters are removed.

    Quantized experts, and those that several processes share, need it.
    """

    def __init__(self, build: BuildContext, module: Any, top_k: int, names: ExpertNames) -> None:
        num_experts, hidden_size, intermediate_size = module.down_proj.shape
        self._experts = Experts(
            build,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            names=names,
        )
        module.register_parameter("gate_up_proj", None)
        module.register_parameter("down_proj", None)

    def __call__(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [T, hidden] of the experts `ids` [T, k] for x [T, hidden]."""
        return self._experts(x, weights.float(), ids.int())

    def slots(self) -> Iterator[WeightSlot]:
        """List the weights."""
        return self._experts.slots("")


def fits_kernel(module: Any) -> bool:
    """Return whether `moe_experts` can replace an experts module."""
    is_plain = module.has_gate and module.is_concatenated
    if not is_plain or module.is_transposed or module.has_bias or module.has_post_expert_norm:
        return False
    x = random_tensor(3, 12, seed=1)
    gate, up = x.chunk(2, dim=-1)
    try:
        return same(module._apply_gate(x), functional.silu(gate) * up)
    except (RuntimeError, TypeError, AttributeError):
        return False


def library_experts(dtype: torch.dtype) -> ExpertsForward:
    """Return a function of transformers that does not wait for the device."""
    has_grouped = dtype == torch.bfloat16
    chosen: ExpertsForward = (
        grouped_mm_experts_forward if has_grouped else batched_mm_experts_forward
    )
    return chosen


def _run(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the experts, as transformers calls them."""
    result: Tensor = module.tokenspeed_experts(module, x, ids, weights)
    return result


ALL_EXPERTS_FUNCTIONS.register(SERVE, _run)
