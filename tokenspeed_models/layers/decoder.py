"""A decoder layer: attention, then an MLP or a mixture of experts, on a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from tokenspeed_core.api import BuildContext, FusedCollective
from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.latent_attention import MultiHeadLatentAttention
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.summed import TakesSummands
from tokenspeed_models.sharding import ShardingSpec, bind_output, fuse_input
from tokenspeed_models.weights import WeightSlot

Output = tuple[torch.Tensor, torch.Tensor]
Kernel = Callable[[torch.Tensor], torch.Tensor]


class Layer(Protocol):
    """A decoder layer of any kind."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last block's output [R, hidden], and the residual stream [R, hidden] without that output.

        Likewise, x [T, hidden] is the previous layer's output, which was not added to the residual [T, hidden] yet. For
        the first layer, x is the stream and the residual is None. positions is int64 [T]. Only rows in `wanted`
        (int64 [R]; None: all) are computed after attention, which needs the keys and values of all. The residual may be
        overwritten.
        """

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights."""

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the sharding specs in order of computation."""


class FeedForward(Protocol):
    """The block after attention in a decoder layer: an MLP, or experts of any kind."""

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalized x + residual [T, hidden], and that sum."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights."""

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the sharding specs in order of computation."""


class FollowedNorm:
    """The norm before a block, followed by a collective on its output. The residual stream has no collective."""

    def __init__(self, norm: RMSNorm, collective: Kernel) -> None:
        self._norm, self._collective = norm, collective

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x [T, size] after the collective."""
        return self._collective(self._norm(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized x + residual [T, size] after the collective, and that sum."""
        x, residual = self._norm.add(x, residual)
        return self._collective(x), residual


class Blocks:
    """The two blocks of a decoder layer, each followed by a collective if its output needs one."""

    def __init__(
        self,
        attention: Attention | MultiHeadLatentAttention,
        mlp: FeedForward,
        mlp_norm: RMSNorm | None = None,
    ) -> None:
        self._modules = attention, mlp
        self.attention: Callable[..., Output] = attention
        self.mlp: Callable[..., Output] = mlp
        self.mlp_norm: Any = mlp_norm
        self._is_added = mlp_norm is not None  # others read or normalize the outputs first

    def mlp_norm_sharding(self, name: str) -> Iterator[ShardingSpec]:
        """List the sharding specs of the norm before the MLP."""
        norm: RMSNorm = self.mlp_norm

        def bind(collective: Kernel) -> None:
            self.mlp_norm = FollowedNorm(norm, collective)

        return bind_output(_fuse_sum(norm.sharding(name), norm, self._modules[1]), bind)

    def attention_sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the sharding specs of attention."""

        def bind(collective: Kernel) -> None:
            self.attention = _followed_by(self.attention, collective)

        return bind_output(self._modules[0].sharding(prefix), bind, is_added=self._is_added)

    def mlp_sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the sharding specs of the MLP."""

        def bind(collective: Kernel) -> None:
            self.mlp = _followed_by(self.mlp, collective)

        return bind_output(self._modules[1].sharding(prefix), bind, is_added=self._is_added)


def _fuse_sum(
    specs: Iterator[ShardingSpec], norm: RMSNorm, block: object
) -> Iterator[ShardingSpec]:
    """Let the norm before a block add up summands, if the block supports it."""
    if not isinstance(block, TakesSummands):
        return specs

    def fuse(build: BuildContext, fused: FusedCollective) -> None:
        if not fused.quantizes:
            norm.fuse_sum(build, fused)
        block.fuse_sum(build, fused)

    return fuse_input(specs, fuse, block.fused_op)


def _followed_by(block: Callable[..., Output], collective: Kernel) -> Callable[..., Output]:
    """Return a block that passes its output, not the residual stream, through a collective."""

    def run(*arguments: Any) -> Output:
        x, residual = block(*arguments)
        return collective(x), residual

    return run


class DecoderLayer:
    """Pre-norm attention and pre-norm MLP (or experts).

    The output of each block is added to the residual stream together with the next norm, in one kernel. That is why
    a layer takes and returns two tensors, and why blocks take the norm before them.
    """

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        norm_eps: float,
        attention: Attention | MultiHeadLatentAttention,
        mlp: FeedForward,
    ) -> None:
        self.input_norm, self.attention = RMSNorm(build, hidden_size, norm_eps), attention
        self.post_norm, self.mlp = RMSNorm(build, hidden_size, norm_eps), mlp
        self._blocks = Blocks(attention, mlp, self.post_norm)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output and the residual stream (see `Layer`)."""
        x, residual = self._blocks.attention(self.input_norm, x, residual, positions, wanted)
        return self.finish(x, residual)

    def finish(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output and the residual stream for the output of attention [R, hidden] and the stream."""
        blocks = self._blocks
        return blocks.mlp(blocks.mlp_norm, x, residual)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights by the names that checkpoints of these families share."""
        yield from self.input_norm.slots(f"{prefix}input_layernorm")
        yield from self.attention.slots(f"{prefix}self_attn.")
        yield from self.post_norm.slots(f"{prefix}post_attention_layernorm")
        yield from self.mlp.slots(f"{prefix}mlp.")

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the sharding specs in order of computation."""
        specs = self.input_norm.sharding(f"{prefix}input_norm")
        yield from _fuse_sum(specs, self.input_norm, self.attention)
        yield from self._blocks.attention_sharding(f"{prefix}attention.")
        yield from self._blocks.mlp_norm_sharding(f"{prefix}post_norm")
        yield from self._blocks.mlp_sharding(f"{prefix}mlp.")


class PostNormDecoderLayer:
    """Attention and MLP with normalized outputs, which are then added to the residual stream (OLMo 2).

    Gemma normalizes their inputs too, with `input_norm` and `pre_mlp_norm`. Without these norms the blocks read the
    stream itself and are built with `has_norm=False`.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        *,
        post_attention_norm: RMSNorm,
        post_mlp_norm: RMSNorm,
        input_norm: RMSNorm | None = None,
        pre_mlp_norm: RMSNorm | None = None,
    ) -> None:
        self.attention, self.mlp = attention, mlp
        self._blocks = Blocks(attention, mlp)
        self.input_norm, self.post_attention_norm = input_norm, post_attention_norm
        self.pre_mlp_norm, self.post_mlp_norm = pre_mlp_norm, post_mlp_norm

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's normalized output and the residual stream (see `Layer`)."""
        blocks = self._blocks
        x, residual = blocks.attention(self.input_norm, x, residual, positions, wanted)
        x, residual = blocks.mlp(self.pre_mlp_norm, self.post_attention_norm(x), residual)
        return self.post_mlp_norm(x), residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights by the names that checkpoints of these families share."""
        if self.input_norm is not None:
            yield from self.input_norm.slots(f"{prefix}input_layernorm")
        yield from self.attention.slots(f"{prefix}self_attn.")
        yield from self.post_attention_norm.slots(f"{prefix}post_attention_layernorm")
        if self.pre_mlp_norm is not None:
            yield from self.pre_mlp_norm.slots(f"{prefix}pre_feedforward_layernorm")
        yield from self.mlp.slots(f"{prefix}mlp.")
        yield from self.post_mlp_norm.slots(f"{prefix}post_feedforward_layernorm")

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the sharding specs in order of computation."""
        if self.input_norm is not None:
            yield from self.input_norm.sharding(f"{prefix}input_norm")
        yield from self._blocks.attention_sharding(f"{prefix}attention.")
        yield from self.post_attention_norm.sharding(f"{prefix}post_attention_norm")
        if self.pre_mlp_norm is not None:
            yield from self.pre_mlp_norm.sharding(f"{prefix}pre_mlp_norm")
        yield from self._blocks.mlp_sharding(f"{prefix}mlp.")
        yield from self.post_mlp_norm.sharding(f"{prefix}post_mlp_norm")
