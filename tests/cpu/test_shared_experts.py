"""Shared experts with fused linear layers, for few and many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernels.reference import fused_linear
from tokenspeed_models.layers import MoE, RMSNorm
from tokenspeed_models.layers.moe import MAX_PARALLEL_TOKENS
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.testing import DenseBuild

HIDDEN = 8
FUSED: dict[str, Callable[..., Any]] = {
    "linear_silu_mul": fused_linear.linear_silu_mul,
    "linear_add": fused_linear.linear_add,
}


class FusedBuild(DenseBuild):
    """A build with fused linear layers. `calls` are the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def fused(self, op: str, **problem: Any) -> Callable[..., Any]:
        kernel = FUSED[op](problem)

        def run(*tensors: torch.Tensor) -> Any:
            self.calls.append(op)
            return kernel(*tensors)

        return run


@pytest.mark.parametrize(
    ("num_tokens", "ops"),
    [
        (3, ["linear_silu_mul"]),
        (MAX_PARALLEL_TOKENS + 1, ["linear_silu_mul", "linear_add"]),
    ],
)
def test_fused_shared_experts_equal_separate_layers(num_tokens: int, ops: list[str]) -> None:
    config = MoeConfig(RoutingConfig(3, 2), 4, frozenset((0,)), shared_size=12)
    separate, fused = DenseBuild(), FusedBuild()
    layers = [MoE(build, HIDDEN, config) for build in (separate, fused)]
    generator = torch.Generator().manual_seed(num_tokens)
    for first, second in zip(*(layer.slots("") for layer in layers), strict=True):
        first.target.normal_(0.0, 0.3, generator=generator)
        second.target.copy_(first.target)
    norm = RMSNorm(separate, HIDDEN, 1e-6)
    norm.weight.fill_(1.0)
    x, residual = torch.randn((2, num_tokens, HIDDEN), generator=generator)
    expected, _ = layers[0](norm, x, residual.clone())
    found, _ = layers[1](norm, x, residual.clone())
    torch.testing.assert_close(found, expected)
    assert fused.calls == ops
