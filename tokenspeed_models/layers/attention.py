"""Grouped-query attention with rotary positions, over a KV cache that the worker provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenspeed_core.api import BuildContext, FusedCollective, Rotation
from tokenspeed_models.describe import window_group
from tokenspeed_models.layers.linear import Linear, Projection, stacked
from tokenspeed_models.layers.norm import NormedLinear, RMSNorm
from tokenspeed_models.layers.qk_norm import AllHeadNorm, HeadNorm
from tokenspeed_models.layers.scheme import full_name
from tokenspeed_models.layers.summed import send_in_parts
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class Attention:
    """Projects queries, keys and values in one GEMM, rotates, attends and projects the result.

    - `cos_sin` is a table of `rotary_table`, shared by layers. It rotates as many values of each head as it has columns.
      With `is_interleaved`, adjacent values are rotated together. Subclasses that do not rotate pass None.
    - `scale` multiplies the scores (None: 1 / sqrt(head_size)), and `soft_cap` bounds them.
    - `qk_norm` normalizes queries and keys before the rotation.
    - `window` is the number of tokens that a query sees, itself included. With `is_chunked`, it is the length of chunks.
    - With `is_bidirectional`, tokens of a prompt also see later tokens of the prompt.
    - With `has_sinks`, each query head has a learned score that joins its softmax.
    - `stacked_name` is the checkpoint's name of queries, keys and values if it stores them as one tensor.
    - `input_size` is the width of x if it differs from `hidden_size`, the width of the output.
    - `has_norm` is False in a layer without a norm before its blocks.

    `num_heads` and `num_kv_heads` count the heads of all processes of the group "attn". Raises ValueError if the
    processes cannot divide them.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        layer: int,
        hidden_size: int,
        input_size: int | None = None,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        cos_sin: torch.Tensor | None,
        is_interleaved: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: HeadNorm | AllHeadNorm | None = None,
        window: int | None = None,
        is_chunked: bool = False,
        is_bidirectional: bool = False,
        stacked_name: str | None = None,
        has_norm: bool = True,
        has_sinks: bool = False,
    ) -> None:
        heads, kv_heads = Shard(0, "attn", num_heads), Shard(0, "attn", num_kv_heads)
        self._heads_shard, self._hidden_size = heads, hidden_size
        local_heads = local_num_heads(build, num_heads)
        local_kv_heads = kv_heads.local_size(full_name(build, "k_proj"), num_kv_heads, build.group)
        self.qkv = Linear(
            build,
            input_size or hidden_size,
            stacked(
                stacked_name,
                (
                    Projection("q_proj", num_heads * head_size, heads),
                    Projection("k_proj", num_kv_heads * head_size, kv_heads),
                    Projection("v_proj", num_kv_heads * head_size, kv_heads),
                ),
            ),
            bias=qkv_bias,
        )
        self._normed_qkv = NormedLinear(build, self.qkv, has_norm=has_norm)
        self.out = Linear(
            build,
            num_heads * head_size,
            (Projection("o_proj", hidden_size, Shard(1, "attn", num_heads)),),
            bias=out_bias,
        )
        self._project_out: Callable[[torch.Tensor], Any] = self.out
        self.cos_sin, self._is_interleaved = cos_sin, is_interleaved
        self._qk_norm = qk_norm
        self._all_head_norm = qk_norm if isinstance(qk_norm, AllHeadNorm) else None
        self._rotation: tuple[torch.Tensor | float, ...] = (
            () if qk_norm is None else qk_norm.operands
        )
        self._sinks = (
            torch.empty(local_heads, dtype=torch.float32, device=build.device)
            if has_sinks
            else None
        )
        self._split = [local_heads, local_kv_heads, local_kv_heads]
        self._heads = (sum(self._split), head_size)
        self._attend = build.attention(
            layer=layer,
            num_heads=local_heads,
            num_kv_heads=local_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5 if scale is None else scale,
            window=window,
            is_chunked=is_chunked,
            is_bidirectional=is_bidirectional,
            soft_cap=soft_cap,
            sinks=self._sinks,
            group=window_group(window),
            rotation=None
            if cos_sin is None
            else Rotation("rope" if qk_norm is None else qk_norm.rotation, cos_sin.shape[1]),
        )

    def __call__(
        self,
        norm: RMSNorm | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [R, hidden] for the normalized x + residual [T, hidden], and that sum [R, hidden].

        Without a norm the sum itself is the input. positions is int64 [T]. `wanted` (int64 [R]; None: all) are the
        rows to return. Without a residual the sum is x. The sum may overwrite the residual.
        """
        qkv, residual = self.project(norm, x, residual)
        return self.output(self.attend(qkv, positions), residual, wanted)

    @property
    def fused_op(self) -> str:
        """The op that adds up and normalizes summands for attention (see `TakesSummands`)."""
        return self._normed_qkv.fused_op

    def fuse_sum(self, build: BuildContext, fused: FusedCollective) -> None:
        """Take summands as x, which the norm adds up (see `TakesSummands`)."""
        self._normed_qkv.fuse_sum(fused)

    def project(
        self, norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [T, out] for the normalized x + residual [T, hidden], and that sum.

        Without a residual the sum is x.
        """
        if residual is None:
            return self.qkv(x if norm is None else norm(x)), x
        return self._normed_qkv(norm, x, residual)

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention of all heads [T, heads * head_size] for `qkv` [T, out] at int64 positions [T]."""
        q, k, v = self.split(qkv)
        if self._all_head_norm is not None:
            q, k = self._all_head_norm(q, k)
        rotation = *self._rotation, positions, self.cos_sin, self._is_interleaved
        return self._attend(q, k, v, *rotation).flatten(1)

    def write(self, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the cache entries of `qkv` [T, out] at int64 positions [T]. Its queries do not attend."""
        q, k, v = self.split(qkv)
        if self._all_head_norm is not None:
            q, k = self._all_head_norm(q, k)
        self._attend.write(q, k, v, *self._rotation, positions, self.cos_sin, self._is_interleaved)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries [T, H, D], keys and values [T, K, D] of `qkv` [T, out]."""
        return qkv.view(qkv.shape[0], *self._heads).split_with_sizes(self._split, dim=1)

    def output(
        self, heads: torch.Tensor, residual: torch.Tensor, wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output projection of `heads` [T, in], and the residual, of the wanted rows: both [R, hidden]."""
        if wanted is not None:
            heads, residual = heads.index_select(0, wanted), residual.index_select(0, wanted)
        return self._project_out(heads), residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the projections and of the query and key norms."""
        yield from self.qkv.slots(prefix)
        yield from self.out.slots(prefix)
        if self._qk_norm is not None:
            yield from self._qk_norm.slots(prefix)
        if self._sinks is not None:
            yield WeightSlot(f"{prefix}sinks", self._sinks, self._heads_shard, "bias")

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Heads are sharded over the attention group; the output is a partial sum."""
        heads = Sharded("heads", "attn")
        yield ShardingSpec(f"{prefix}qkv", Replicated(), heads, self.qkv.out_size)
        if self._all_head_norm is not None:
            yield from self._all_head_norm.sharding(prefix)
        yield ShardingSpec(
            f"{prefix}out",
            heads,
            Partial(("attn",)),
            self._hidden_size,
            send_parts=self._send_parts,
        )

    def _send_parts(self, fused: FusedCollective) -> None:
        self._project_out = send_in_parts(self.out, fused)


def local_num_heads(build: BuildContext, num_heads: int) -> int:
    """Return this process's query heads. Raises ValueError if the processes cannot divide them."""
    group = build.group("attn")
    if num_heads % group.size:
        raise ValueError(
            f"{num_heads} attention heads cannot be divided among {group}. Choose sizes that divide them."
        )
    return num_heads // group.size
