"""A model's attention layers, bound to the KV arena: per-step work for each group, then one call for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tokenspeed_core.api.attention import AttentionKernel, AttentionProblem, AttentionStep
from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.models import KVScale, Rotation
from tokenspeed_core.kernels.select import Choice
from tokenspeed_core.kv_cache.page_layout import PageLayout
from tokenspeed_core.worker.inputs import GroupInputs

T = TypeVar("T")
Batch = tuple[str, AttentionStep, slice | None]
"""A phase, its step, and its query tokens (None: all)."""


UNSCALED = KVScale()


class AttentionGroup:
    """The layers of one cache group. `begin` is called once per step, before the model's forward."""

    def __init__(self, spec: CacheGroupSpec) -> None:
        """Start without layers."""
        self.spec = spec
        self.kernels: dict[tuple[KernelSpec, AttentionProblem], AttentionKernel] = {}
        # Whether decodes and prefills of a mixed step run separately: on a device, if their backends differ.
        self.is_split = False
        self.kv_slots: Tensor = torch.empty(0, dtype=torch.int64)
        self.batches: list[Batch] = []
        # The prefills of a split step run on this stream, in parallel with its decodes.
        self.side: torch.cuda.Stream | None = None
        # By key of `once`: the first layer that called it, and the result.
        self._computed: dict[object, tuple[CachedLayer, Any]] = {}

    @property
    def takes_drafts(self) -> bool:
        """Whether its decode kernels serve rows with draft tokens. Those of latent attention do not."""
        decodes = [each for (_, problem), each in self.kernels.items() if problem.phase == "decode"]
        return bool(decodes) and all(getattr(each, "takes_drafts", False) for each in decodes)

    def begin(self, inputs: GroupInputs) -> None:
        """Prepare each kernel for a step, and note which query tokens it serves."""
        self.kv_slots = inputs.kv_slots
        self._computed.clear()
        if inputs.decodes is not None and inputs.prefills is not None:
            num = inputs.decodes.num_tokens
            self.batches = [
                ("decode", inputs.decodes, slice(num)),
                ("prefill", inputs.prefills, slice(num, None)),
            ]
        else:
            is_decode = inputs.num_decodes == inputs.step.num_rows
            self.batches = [("decode" if is_decode else "prefill", inputs.step, None)]
        for phase, step, _ in self.batches:
            for (_, problem), kernel in self.kernels.items():
                if problem.phase == phase:
                    kernel.prepare(step)

    def once(self, key: object, layer: CachedLayer, compute: Callable[[], T]) -> T:
        """Return the result of `compute()` in the first layer of this forward. A captured forward repeats it in each replay."""
        first, computed = self._computed.get(key, (layer, None))
        if layer is first:
            computed = compute()
            self._computed[key] = layer, computed
        result: T = computed
        return result

    def attend(self, attend: Callable[[Batch], None]) -> None:
        """Call `attend` for each batch of the step. On a device, two batches run in parallel."""
        first, *others = self.batches
        side = self.side if others else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        # Prefills first: they are few long programs, and decodes fit between them.
        with torch.cuda.stream(side):
            for batch in others:
                attend(batch)
        attend(first)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)


@dataclass(slots=True, eq=False)
class AttentionLayer:
    """One layer's attention, as the model calls it. Bound once all layers are known and memory is sized.

    The cache holds keys and values divided by `kv_scale`; queries are multiplied by its `key`, and results by its
    `value`.
    """

    group: AttentionGroup
    index: int  # of the layer in its group
    layer: int
    problem: Callable[..., AttentionProblem]  # of a `phase` and a `block_size`
    rotation: Rotation | None
    kv_scale: KVScale = UNSCALED
    sinks: Tensor | None = None  # float32 [H], a parameter of the model
    choices: dict[str, Choice] = field(default_factory=dict)  # by phase
    # By phase: (q, k_cache, v_cache, out)
    forwards: dict[str, Callable[..., None]] = field(default_factory=dict)
    # (q, k, v, k_cache, v_cache, slots, *rotation)
    write_kv: Callable[..., None] = field(init=False)
    caches: tuple[Tensor, ...] = ()  # keys and values

    def bind(self, phase: str, kernel: AttentionKernel) -> None:
        """Set the kernel of a phase."""
        forward: Callable[..., None] = kernel.forward
        self.forwards[phase] = forward if self.sinks is None else partial(forward, sinks=self.sinks)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rotation: Any) -> Tensor:
        """Rotate q [T, H, D] and k [T, K, D], write k and v [T, K, V] into the cache, then attend.

        Returns [T, H, V].
        """
        self.write_kv(q, k, v, *self.caches, self.group.kv_slots, *rotation)
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        self.group.attend(lambda batch: self._attend(batch, q, out))
        return out if self.kv_scale.value == 1.0 else out.mul_(self.kv_scale.value)

    def write(self, q: Tensor, k: Tensor, v: Tensor, *rotation: Any) -> None:
        """Rotate q and k, and write k and v into the cache, as a call does."""
        self.write_kv(q, k, v, *self.caches, self.group.kv_slots, *rotation)

    def _attend(self, batch: Batch, q: Tensor, out: Tensor) -> None:
        phase, _, tokens = batch
        if tokens is not None:
            q, out = q[tokens], out[tokens]
        k_cache, v_cache = self.caches
        self.forwards[phase](q, k_cache, v_cache, out)


def make_write_kv(
    rotate: Callable[..., None] | None, write: Callable[..., None], scale: KVScale
) -> Callable[..., None]:
    """Return an `AttentionLayer.write_kv` of separate kernels. It rotates and scales q in place."""

    def write_separately(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        *rotation: Any,
    ) -> None:
        if rotate is not None:
            rotate(q, k, *rotation)
        if scale != UNSCALED:
            q.mul_(scale.key)
            k, v = k / scale.key, v / scale.value
        write(k, v, k_cache, v_cache, slots)

    return write_separately


class CachedLayer(Protocol):
    """A layer that keeps the parts of its cache group."""

    @property
    def group(self) -> AttentionGroup:
        """The layer's group."""

    @property
    def index(self) -> int:
        """The layer's index in its group."""

    caches: tuple[Tensor, ...]


def bind_arena(
    layers: Sequence[CachedLayer], arena: Tensor, layout: PageLayout, dtype: torch.dtype
) -> None:
    """Give each layer its parts of an arena, uint8 [pages, page_bytes], as `[B, block_size, *shape]`."""
    blocks = {
        group.name: arena.view(-1, group.stride)[:, : group.block_bytes].view(dtype)
        for group in layout.groups
    }
    for layer in layers:
        spec = layer.group.spec
        values = blocks[spec.name]
        start = layer.index * values.shape[1] // spec.num_layers
        caches = []
        for part in spec.parts:
            end = start + layout.block_size * prod(part.shape)
            caches.append(values[:, start:end].view(len(values), layout.block_size, *part.shape))
            start = end
        layer.caches = tuple(caches)
