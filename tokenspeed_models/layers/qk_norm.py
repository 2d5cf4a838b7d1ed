"""RMS normalisation of queries and keys before they are rotated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.norm import make_norm_weight, norm_slot
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.weights import WeightSlot


class HeadNorm:
    """Normalises each head, with one weight [head_size] for all queries and one for all keys (Qwen 3, Gemma 3).

    The op of the rotation computes it. `operands` are that op's arguments for it.
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
    """Normalises all heads of the queries together, and all heads of the keys (OLMo 2).

    With several processes, a row's heads are on all of them, and its mean square needs a collective.
    """

    rotation = "rope"
    operands: tuple[()] = ()

    def __init__(self, build: BuildContext, q_size: int, k_size: int, eps: float) -> None:
        self._q_weight = make_norm_weight(build, q_size, 0.0)
        self._k_weight = make_norm_weight(build, k_size, 0.0)
        self._eps = eps
        self._q_norm = build.op("rms_norm", size=q_size, dtype=dtype_name(build.dtype))
        self._k_norm = build.op("rms_norm", size=k_size, dtype=dtype_name(build.dtype))

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised copies of q [T, H, D] and k [T, K, D]."""
        normed_q: torch.Tensor = self._q_norm(q.flatten(1), self._q_weight, self._eps)
        normed_k: torch.Tensor = self._k_norm(k.flatten(1), self._k_weight, self._eps)
        return normed_q.view(q.shape), normed_k.view(k.shape)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List both weights."""
        yield norm_slot(f"{prefix}q_norm.weight", self._q_weight, 0.0)
        yield norm_slot(f"{prefix}k_norm.weight", self._k_weight, 0.0)
