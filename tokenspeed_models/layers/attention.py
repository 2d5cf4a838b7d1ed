"""Grouped-query attention with rotary positions, over a cache that the runner provides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext, Rotation
from tokenspeed_models.describe import window_group
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.layers.norm import NormedLinear, RMSNorm
from tokenspeed_models.placement import Boundary, Partial, Replicated, Sharded
from tokenspeed_models.weights import Shard, WeightSlot


class Attention:
    """Projects queries, keys and values in one matrix product, rotates, attends and projects back.

    `cos_sin` is the table of `rotary_table`, shared by layers. `qk_norm_eps` set means that the heads of
    queries and keys are normalised before they are rotated. `window` is in tokens, the query's own included.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        cos_sin: torch.Tensor,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        heads, kv_heads = Shard(0, "attn", num_heads), Shard(0, "attn", num_kv_heads)
        self.qkv = Linear(
            build,
            hidden_size,
            (
                Projection("q_proj", num_heads * head_size, heads),
                Projection("k_proj", num_kv_heads * head_size, kv_heads),
                Projection("v_proj", num_kv_heads * head_size, kv_heads),
            ),
            bias=qkv_bias,
        )
        self._normed_qkv = NormedLinear(build, self.qkv)
        self.out = Linear(
            build,
            num_heads * head_size,
            (Projection("o_proj", hidden_size, Shard(1, "attn", num_heads)),),
            bias=out_bias,
        )
        self.cos_sin = cos_sin
        self._norm: tuple[torch.Tensor, torch.Tensor, float] | None = None
        if qk_norm_eps is not None:
            q_weight, k_weight = torch.empty(2, head_size, dtype=build.dtype, device=build.device)
            self._norm = (q_weight, k_weight, qk_norm_eps)
        self._split = [num_heads, num_kv_heads, num_kv_heads]
        self._heads = (sum(self._split), head_size)
        self._attend = build.attention(
            layer=layer,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=head_size**-0.5,
            window=window,
            group=window_group(window),
            rotation=Rotation("rope" if qk_norm_eps is None else "qk_norm_rope", cos_sin.shape[1]),
        )

    def project(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [T, out], of x + residual [T, hidden], normalised; and that sum.

        Without a residual x is the sum; it may be written over the residual.
        """
        return (self.qkv(norm(x)), x) if residual is None else self._normed_qkv(norm, x, residual)

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what the heads see, [T, heads * head_size], for what `project` gave, at int64 positions [T]."""
        q, k, v = qkv.view(positions.shape[0], *self._heads).split_with_sizes(self._split, dim=1)
        return self._attend(q, k, v, *(self._norm or ()), positions, self.cos_sin, False).flatten(1)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the projections, and of the norms of queries and keys."""
        yield from self.qkv.slots(prefix)
        yield from self.out.slots(prefix)
        for name, weight in zip(("q_norm", "k_norm"), (self._norm or ())[:2], strict=False):
            yield WeightSlot(f"{prefix}{name}.weight", weight, None, "norm")

    def boundaries(self, prefix: str) -> Iterator[Boundary]:
        """Heads are cut over the attention group; the result is a sum."""
        yield Boundary(f"{prefix}qkv", "attn", Replicated(), Sharded("heads"))
        yield Boundary(f"{prefix}out", "attn", Sharded("heads"), Partial())
