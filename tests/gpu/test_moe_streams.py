"""Shared experts on a stream beside the routing."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_models.layers import MoE, RMSNorm
from tokenspeed_models.layers.moe import MAX_PARALLEL_TOKENS, MIN_PARALLEL_TOKENS
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.testing import DenseBuild

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN = 256
# Shared experts take much longer than the others, so that reading their result too early gives another one.
CONFIG = MoeConfig(
    RoutingConfig(4, 2), intermediate_size=64, layers=frozenset((0,)), shared_size=1 << 16
)


class TwoStreams(DenseBuild):
    """A build on a CUDA device with a side stream."""

    def __init__(self) -> None:
        super().__init__(device="cuda")
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def side_stream(self) -> torch.cuda.Stream:
        return self._side


@torch.inference_mode()
def test_shared_experts_on_another_stream_give_the_same_sum() -> None:
    alone, beside = DenseBuild(device="cuda"), TwoStreams()
    layers = [MoE(build, HIDDEN, CONFIG) for build in (alone, beside)]
    norm = RMSNorm(alone, HIDDEN, 1e-6)
    norm.weight.fill_(1.0)
    for slots in zip(*(layer.slots("") for layer in layers), strict=True):
        slots[0].target.normal_(0.0, 0.05)
        slots[1].target.copy_(slots[0].target)
    for num_tokens in (MIN_PARALLEL_TOKENS, 40, MAX_PARALLEL_TOKENS + 1):
        for _ in range(3):
            x, residual = torch.randn((2, num_tokens, HIDDEN), device="cuda")
            expected, _ = layers[0](norm, x, residual.clone())
            found, _ = layers[1](norm, x, residual.clone())
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
