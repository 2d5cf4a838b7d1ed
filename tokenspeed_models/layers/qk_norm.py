"""RMS normalization of queries and keys before they are rotated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.norm import make_norm_weight, norm_slot
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class HeadNorm:
    """Normalizes each head, with one weight [head_size] for all queries and one for all keys (Qwen 3, Gemma 3).

    The RoPE op computes this norm. `operands` are the arguments of that op for the norm.
    """

    rotation = "qk_norm_rope"

    def __init__(
        self, build: BuildContext, head_size: int, eps: float, *, weight_offset: float = 0.0
    ) -> None:
        self._q_weight = make_norm_weight(build, head_size, weight_offset)
        self._k_weight = make_norm_weight(build, head_size, weight_offset)
        self._weight_offset = weight_offset
        self.operands: tuple[torch.Tensor, torch.Tensor, float] = (
            self._q_weight,
            self._k_weight,
            eps,
        )

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List both weights."""
        yield norm_slot(f"{prefix}q_norm.weight", self._q_weight, self._weight_offset)
        yield norm_slot(f"{prefix}k_norm.weight", self._k_weight, self._weight_offset)


class AllHeadNorm:
    """Normalizes all heads of the queries together, and all heads of the keys (OLMo 2).

    With several processes, each process has some heads of a row, so the sums of squares are added up over all processes.
    """

    rotation = "rope"
    operands: tuple[()] = ()

    def __init__(
        self, build: BuildContext, num_heads: int, num_kv_heads: int, head_size: int, eps: float
    ) -> None:
        self._q_shard, self._k_shard = Shard(0, "attn", num_heads), Shard(0, "attn", num_kv_heads)
        q_size = self._q_shard.local_size("q_norm", num_heads * head_size, build.group)
        k_size = self._k_shard.local_size("k_norm", num_kv_heads * head_size, build.group)
        self._q_weight = make_norm_weight(build, q_size, 0.0)
        self._k_weight = make_norm_weight(build, k_size, 0.0)
        self._eps = eps
        # Numbers of summed squares on all processes, which may hold copies of a key head.
        num_processes = build.group("attn").size
        self._num_squares = (num_processes * q_size, num_processes * k_size)
        self._all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._q_norm = build.op("rms_norm", size=q_size, dtype=dtype_name(build.dtype))
        self._k_norm = build.op("rms_norm", size=k_size, dtype=dtype_name(build.dtype))

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalized copies of q [T, H, D] and k [T, K, D]."""
        if self._all_reduce is not None:
            return self._normalize(q, k, self._all_reduce)
        normed_q: torch.Tensor = self._q_norm(q.flatten(1), self._q_weight, self._eps)
        normed_k: torch.Tensor = self._k_norm(k.flatten(1), self._k_weight, self._eps)
        return normed_q.view(q.shape), normed_k.view(k.shape)

    def _normalize(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        all_reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize the heads of this process by the sums of all."""
        wide = [each.to(torch.float32) for each in (q, k)]
        sums = all_reduce(torch.stack([each.square().sum((1, 2)) for each in wide], dim=1))
        weights = (self._q_weight, self._k_weight)
        normed_q, normed_k = (
            (each * torch.rsqrt(total / num + self._eps)[:, None, None]).to(q.dtype)
            * weight.view(each.shape[1:])
            for each, total, num, weight in zip(
                wide, sums.unbind(1), self._num_squares, weights, strict=True
            )
        )
        return normed_q, normed_k

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List both weights."""
        yield WeightSlot(f"{prefix}q_norm.weight", self._q_weight, self._q_shard, "norm")
        yield WeightSlot(f"{prefix}k_norm.weight", self._k_weight, self._k_shard, "norm")

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Each process computes the sums of squares of its heads, and normalizes its heads by the sums of all."""
        heads, sums = Sharded("heads", "attn"), Partial(("attn",))
        yield ShardingSpec(f"{prefix}qk_squares", heads, sums, 2, self._bind, "float32")
        yield ShardingSpec(f"{prefix}qk_norm", Replicated(), heads, sum(self._num_squares))

    def _bind(self, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._all_reduce = all_reduce
