"""The fusion pass: which ops a model calls, in which order, with and without fused blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tokenspeed_core.api import AttentionCall
from tokenspeed_kernels.reference import fused_linear
from tokenspeed_models.families.llama import LlamaForCausalLM
from tokenspeed_models.families.qwen3 import Qwen3ForCausalLM
from tokenspeed_models.families.qwen3_moe import Qwen3MoeForCausalLM
from tokenspeed_models.layers import (
    MLP,
    Attention,
    CausalLM,
    DecoderLayer,
    Embedding,
    OutputHead,
    RMSNorm,
)
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.testing import DenseBuild

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
MOE: dict[str, Any] = {
    **SMALL,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
ROTATIONS = ("rope", "qk_norm_rope")  # part of a layer's attention

FIRST = ["rms_norm", "linear"]  # the first layer's norm, and its query, key and value projection
NEXT = ["add_rms_norm_linear"]  # the same of any other layer, which adds to the residual first
DENSE = ["attention", "linear", "add_rms_norm_linear_silu_mul", "linear"]
EXPERTS = ["attention", "linear", "add_rms_norm", "linear", "moe_route", "moe_experts"]
LAST = ["add_rms_norm"]  # the final norm


class RecordingBuild(DenseBuild):
    """A build that records the ops a model calls, in order, and the layer of each request for a fused op."""

    def __init__(self, *fused_ops: str) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.requests: list[tuple[str, int | None]] = []
        self._fused_ops = fused_ops
        self._layer: int | None = None

    def each_layer(self, num_layers: int) -> Iterator[int]:
        for layer in range(num_layers):
            self._layer = layer
            yield layer
        self._layer = None

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        kernel = super().op(op, **problem)
        return kernel if op in ROTATIONS else self._recorded(op, kernel)

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        self.requests.append((op, self._layer))
        if op not in self._fused_ops:
            return None
        return self._recorded(op, getattr(fused_linear, op)(problem))

    def attention(self, **layer: Any) -> AttentionCall:
        return self._recorded("attention", super().attention(**layer))

    def _recorded(self, op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            self.calls.append(op)
            return kernel(*operands)

        return call


def run(
    family: Callable[[dict[str, Any], RecordingBuild], CausalLM],
    config: dict[str, Any],
    build: RecordingBuild,
    num_tokens: int,
) -> torch.Tensor:
    """Return the hidden states of one forward with dummy weights, for the last token."""
    model = family(config, build)
    model.load_weights(read_dummy("", model, lambda done, total: None))
    build.calls.clear()
    ids = torch.arange(num_tokens) % 101
    return model.forward(ids, torch.arange(num_tokens), torch.tensor([num_tokens - 1]))


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 65, 512])
def test_layers_run_one_after_another_without_fused_kernels(num_tokens: int) -> None:
    build = RecordingBuild()
    run(Qwen3ForCausalLM, SMALL, build, num_tokens)
    assert build.calls == [*FIRST, *DENSE, *NEXT, *DENSE, *NEXT, *DENSE, *LAST]
    ops = ("fused_block", "fused_block_in_place")
    assert build.requests == [(op, layer) for layer in (0, 1) for op in ops]


@pytest.mark.parametrize(
    ("num_tokens", "op"),
    [
        (1, None),
        (2, "fused_block"),
        (64, "fused_block"),
        (65, None),
        (511, None),
        (512, "fused_block_in_place"),
    ],
)
def test_fused_block_replaces_all_ops_between_two_attentions(
    num_tokens: int, op: str | None
) -> None:
    build, plain = RecordingBuild("fused_block", "fused_block_in_place"), RecordingBuild()
    hidden = run(Qwen3ForCausalLM, SMALL, build, num_tokens)
    if op is None:
        assert build.calls == [*FIRST, *DENSE, *NEXT, *DENSE, *NEXT, *DENSE, *LAST]
    else:
        assert build.calls == [*FIRST, "attention", op, "attention", op, *DENSE, *LAST]
    expected = run(Qwen3ForCausalLM, SMALL, plain, num_tokens)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_layers_with_experts_keep_their_own_ops() -> None:
    plain, build = RecordingBuild(), RecordingBuild("fused_block")
    expected = run(Qwen3MoeForCausalLM, MOE, plain, 3)
    assert plain.calls == [*FIRST, *EXPERTS, *NEXT, *DENSE, *NEXT, *EXPERTS, *LAST]
    hidden = run(Qwen3MoeForCausalLM, MOE, build, 3)
    fused = [*NEXT, "attention", "fused_block"]
    assert build.calls == [*FIRST, *EXPERTS, *fused, *EXPERTS, *LAST]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_layers_with_biases_are_not_fused() -> None:
    build = RecordingBuild("fused_block")
    run(LlamaForCausalLM, {**SMALL, "mlp_bias": True}, build, 3)
    assert "fused_block" not in build.calls
    assert build.requests == []


class OwnLayer(DecoderLayer):
    """A family's own layer, which may compute something else."""


class OwnFamily(CausalLM):
    def __init__(self, config: dict[str, Any], build: RecordingBuild) -> None:
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_size": 16,
        }
        cos_sin = torch.zeros(1024, 16)
        layers = [
            OwnLayer(
                build,
                32,
                1e-6,
                Attention(build, layer=layer, cos_sin=cos_sin, **sizes),
                MLP(build, 32, 64),
            )
            for layer in build.each_layer(2)
        ]
        embedding = Embedding(build, 101, 32)
        super().__init__(
            build,
            layers,
            embedding=embedding,
            norm=RMSNorm(build, 32, 1e-6),
            head=OutputHead(build, 101, 32, embedding),
        )


def test_subclasses_of_a_layer_are_not_fused() -> None:
    build = RecordingBuild("fused_block")
    run(OwnFamily, {}, build, 3)
    assert build.requests == []
    assert build.calls == [*FIRST, *DENSE, *NEXT, *DENSE, *LAST]
