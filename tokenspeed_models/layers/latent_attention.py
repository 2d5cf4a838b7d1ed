"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434) over a cache that the worker provides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenspeed_core.api import BuildContext, FusedCollective, LatentSizes
from tokenspeed_models.layers.attention import local_num_heads
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.layers.norm import NormedLinear, RMSNorm
from tokenspeed_models.layers.summed import send_in_parts
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


class MultiHeadLatentAttention:
    """Projects queries and a latent per token, attends to the latents of earlier tokens, and projects the result.

    `query_rank` is the size of the queries' own latent; None projects queries in one step. `cos_sin` is a table of
    `rotary_table`. `bias` adds biases to the projections to latents and to the output projection. A quantized
    expansion of latents is dequantized when it is loaded. The heads of `sizes` are those of all processes of the group
    "attn", which all keep the latents. Raises ValueError if the heads cannot be divided.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        layer: int,
        hidden_size: int,
        sizes: LatentSizes,
        query_rank: int | None,
        scale: float,
        cos_sin: torch.Tensor,
        is_interleaved: bool = True,
        bias: bool = False,
    ) -> None:
        if bias and query_rank is None:
            raise ValueError("config.json: attention_bias needs q_lora_rank")
        heads, self.query_rank, self._hidden_size = sizes.num_heads, query_rank, hidden_size
        local_heads = local_num_heads(build, heads)
        self.sizes = replace(sizes, num_heads=local_heads)
        head_size, entry_size = (
            sizes.nope_size + sizes.rope_size,
            sizes.latent_size + sizes.rope_size,
        )
        columns, rows = Shard(0, "attn", heads), Shard(1, "attn", heads)
        query = Projection("q_proj", heads * head_size, columns)
        if query_rank is not None:
            query = Projection("q_a_proj", query_rank, None)
        self.down = Linear(
            build,
            hidden_size,
            (query, Projection("kv_a_proj_with_mqa", entry_size, None)),
            bias=bias,
        )
        self._normed_down = NormedLinear(build, self.down)
        self._split = self.down.sizes
        self.query_norm: RMSNorm | None = None
        if query_rank is not None:
            self.query_norm = RMSNorm(build, query_rank, LATENT_EPS)
            self.query_up = Linear(
                build, query_rank, (Projection("q_b_proj", heads * head_size, columns),)
            )
        self.latent_norm_weight = torch.empty(
            sizes.latent_size, dtype=build.dtype, device=build.device
        )
        up_size = sizes.nope_size + sizes.value_size
        self._up = Projection("kv_b_proj", heads * up_size, columns)
        # [H, N + V, L]
        self._kv_up = torch.empty(
            local_heads, up_size, sizes.latent_size, dtype=build.dtype, device=build.device
        )
        is_quantized = build.scheme(self._up.name) is not None
        self._quantized_up = Linear(build, sizes.latent_size, (self._up,)) if is_quantized else None
        self.out = Linear(
            build,
            heads * sizes.value_size,
            (Projection("o_proj", hidden_size, rows),),
            bias=bias,
        )
        self._project_out: Callable[[torch.Tensor], Any] = self.out
        self.cos_sin, self._is_interleaved = cos_sin, is_interleaved
        self._heads = (local_heads, head_size)
        self._attend = build.latent_attention(layer=layer, sizes=self.sizes, scale=scale)

    def __call__(
        self,
        norm: RMSNorm | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [R, hidden] for the normalized x + residual [T, hidden], and that sum [R, hidden].

        positions is int64 [T]. `wanted` (int64 [R]; None: all) are the rows to return. Without a residual the sum is
        x. The sum may overwrite the residual.
        """
        if residual is None:
            down, residual = self.down(x if norm is None else norm(x)), x
        else:
            down, residual = self._normed_down(norm, x, residual)
        heads = self._attend_heads(down, positions)
        if wanted is not None:
            heads, residual = heads.index_select(0, wanted), residual.index_select(0, wanted)
        return self._project_out(heads), residual

    @property
    def fused_op(self) -> str:
        """The op that adds up and normalizes summands for attention (see `TakesSummands`)."""
        return self._normed_down.fused_op

    def fuse_sum(self, build: BuildContext, fused: FusedCollective) -> None:
        """Take summands as x, which the norm adds up (see `TakesSummands`)."""
        self._normed_down.fuse_sum(fused)

    def _attend_heads(self, down: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention of all heads [T, H * V] for the down projections [T, out]."""
        q, kv = down.split_with_sizes(self._split, dim=1)
        if self.query_norm is not None:
            q = self.query_up(self.query_norm(q))
        return self._attend(
            q.view(q.shape[0], *self._heads),
            kv,
            self.latent_norm_weight,
            LATENT_EPS,
            positions,
            self.cos_sin,
            self._is_interleaved,
            self._kv_up,
        ).flatten(1)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the projections and of the latents' norms."""
        yield from self.down.slots(prefix)
        if self.query_norm is not None:
            yield from self.query_norm.slots(f"{prefix}q_a_layernorm")
            yield from self.query_up.slots(prefix)
        yield from self.out.slots(prefix)
        dequantize = None
        if self._quantized_up is None:
            weight = self._kv_up.flatten(0, 1)
            yield WeightSlot(f"{prefix}{self._up.name}.weight", weight, self._up.shard)
        else:
            yield from self._quantized_up.slots(prefix)
            dequantize = partial(self._dequantize, self._quantized_up)
        # Last, since it is completed after the scales of the expansion.
        name = f"{prefix}kv_a_layernorm.weight"
        yield WeightSlot(name, self.latent_norm_weight, None, "norm", on_complete=dequantize)

    def _dequantize(self, up: Linear) -> None:
        """Write the dequantized expansion, its product with the identity, and free the quantized one."""
        weight = self._kv_up
        identity = torch.eye(self.sizes.latent_size, dtype=weight.dtype, device=weight.device)
        weight.copy_(up(identity).t().view(weight.shape))
        for tensor in up.operands:
            if tensor is not None:
                tensor.untyped_storage().resize_(0)

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Heads are sharded over the attention group; the output is a partial sum."""
        heads = Sharded("heads", "attn")
        yield ShardingSpec(f"{prefix}down", Replicated(), Replicated(), self.down.out_size)
        yield ShardingSpec(f"{prefix}heads", Replicated(), heads, self.out.in_size)
        yield ShardingSpec(
            f"{prefix}out",
            heads,
            Partial(("attn",)),
            self._hidden_size,
            send_parts=self._send_parts,
        )

    def _send_parts(self, fused: FusedCollective) -> None:
        self._project_out = send_in_parts(self.out, fused)
