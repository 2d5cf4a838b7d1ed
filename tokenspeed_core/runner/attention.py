"""A model's attention layers, bound to the KV arena: per-step work once a group, then one call a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tokenspeed_core.kernels.attention import AttentionKernel, AttentionProblem, AttentionStep
from tokenspeed_core.runner.inputs import GroupInputs

WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class BoundKernels:
    """The kernels of one layer problem; `is_split` says that the phases have different backends."""

    prefill: AttentionKernel
    decode: AttentionKernel
    is_split: bool


@dataclass(slots=True, eq=False)
class _Piece:
    """What serves a run of query tokens in this step; `tokens` None stands for all of them."""

    is_decode: bool
    tokens: slice | None


class AttentionGroup:
    """The layers of one cache group. `begin` is called once a step, before the model's forward."""

    def __init__(self) -> None:
        """Start without layers."""
        self.kernels: dict[AttentionProblem, BoundKernels] = {}
        self.slot_mapping: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.pieces: tuple[_Piece, ...] = ()

    @property
    def is_split(self) -> bool:
        """Whether mixed steps are served in two parts."""
        return any(bound.is_split for bound in self.kernels.values())

    def begin(self, inputs: GroupInputs) -> None:
        """Take a step: tell each kernel in use, and note which query tokens it serves."""
        self.slot_mapping = inputs.slot_mapping
        parts: list[tuple[bool, AttentionStep, slice | None]]
        if inputs.decodes is not None and inputs.prefills is not None:
            middle = inputs.decodes.num_tokens
            parts = [(True, inputs.decodes, slice(0, middle)), (False, inputs.prefills, slice(middle, None))]
        else:
            parts = [(inputs.num_decodes == inputs.step.num_rows, inputs.step, None)]
        for bound in self.kernels.values():
            for is_decode, step, _ in parts:
                (bound.decode if is_decode else bound.prefill).prepare(step)
        self.pieces = tuple(_Piece(is_decode, tokens) for is_decode, _, tokens in parts)


@dataclass(slots=True, eq=False)
class AttentionLayer:
    """One layer's attention as the model calls it. Bound after all layers are known and memory is sized.

    The cache holds keys and values divided by `kv_scale`: queries and results are multiplied by it instead.
    """

    group: AttentionGroup
    index: int  # of the layer in its group
    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None
    kv_scale: float = 1.0
    bound: BoundKernels = field(init=False)
    write: WriteKV = field(init=False)
    k_cache: torch.Tensor = field(init=False)
    v_cache: torch.Tensor = field(init=False)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k, v [T, K, D] into the cache, then attend; q and the result are [T, H, D]."""
        group, bound = self.group, self.bound
        if self.kv_scale != 1.0:
            q, k, v = q * self.kv_scale, k / self.kv_scale, v / self.kv_scale
        self.write(k, v, self.k_cache, self.v_cache, group.slot_mapping)
        out = q.new_empty(q.shape)
        for piece in group.pieces:
            kernel = bound.decode if piece.is_decode else bound.prefill
            if piece.tokens is None:
                kernel.forward(q, self.k_cache, self.v_cache, out)
            else:
                kernel.forward(q[piece.tokens], self.k_cache, self.v_cache, out[piece.tokens])
        return out if self.kv_scale == 1.0 else out.mul_(self.kv_scale)


def bind_arena(layers: Sequence[AttentionLayer], arena: torch.Tensor, block_size: int, dtype: torch.dtype) -> None:
    """Give each layer its views of an arena, uint8 [pages, page_bytes].

    A page of an attention group starts with its block, `[layers, 2, block_size, K, D]`.
    """
    for layer in layers:
        size = block_size * layer.num_kv_heads * layer.head_size
        start = 2 * layer.index * size
        block = arena.view(dtype)[:, start : start + 2 * size]
        caches = block.view(-1, 2, block_size, layer.num_kv_heads, layer.head_size)
        layer.k_cache, layer.v_cache = caches[:, 0], caches[:, 1]
