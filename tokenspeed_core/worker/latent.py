"""A model's latent attention layers (MLA), bound to the KV arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.models import LatentSizes
from tokenspeed_core.worker.attention import AttentionGroup, Batch

OPS = (
    ("mla_write", None),
    ("mla_absorb", None),
    ("mla_decode", "decode"),
    ("mla_project", None),
    ("mla_prefill", "prefill"),
)
"""The ops of a layer with their phases, in the order of `LatentKernels`."""
FIND_SHARED = "find_shared_prefix"
"""The last op, for layers with a decode kernel that reads shared entries once."""


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """The kernels of `OPS` for one layer, then that of `FIND_SHARED`. Their contracts describe the arguments."""

    write: Callable[..., None]
    absorb: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    project: Callable[..., None]
    prefill: Callable[..., None]
    find_shared: Callable[[Tensor, Tensor], Tensor | None] | None = None

    def plan(self, step: AttentionStep) -> Any:
        """Return the last argument of `decode` in all layers of a step: its plan, a shared prefix, or None."""
        plan = getattr(self.decode, "plan", None)
        if plan is not None:
            return plan()
        if self.find_shared is None or not step.shares_prefix:
            return None
        return self.find_shared(step.block_table, step.seq_lens)


@dataclass(slots=True, eq=False)
class LatentLayer:
    """One layer's latent attention, as the model calls it. Bound once all layers are known and memory is sized.

    Decodes attend to the latents themselves: the key expansion is absorbed into the queries, and the value expansion
    applies to the result. Prefills expand at most `max_expanded` cached latents at a time. The cache holds entries
    divided by `kv_scale`; queries and results are multiplied by it.
    """

    group: AttentionGroup
    index: int  # of the layer in its group
    layer: int
    sizes: LatentSizes
    scale: float
    max_expanded: int
    kv_scale: float
    kernels: LatentKernels = field(init=False)
    caches: tuple[Tensor, ...] = ()  # the entries [B, block_size, L + R]

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
        kv_up: Tensor,
    ) -> Tensor:
        """Rotate, write the cache entries, then attend; see `LatentAttentionCall`."""
        self.kernels.write(
            q,
            kv,
            norm_weight,
            eps,
            positions,
            cos_sin,
            interleaved,
            *self.caches,
            self.group.kv_slots,
            self.kv_scale,
        )
        if self.kv_scale != 1.0:
            q.mul_(self.kv_scale)
        out = q.new_empty((q.shape[0], self.sizes.num_heads, self.sizes.value_size))
        self.group.attend(lambda batch: self._attend(batch, q, kv_up, out))
        return out if self.kv_scale == 1.0 else out.mul_(self.kv_scale)

    def _attend(self, batch: Batch, q: Tensor, kv_up: Tensor, out: Tensor) -> None:
        phase, step, tokens = batch
        if tokens is not None:
            q, out = q[tokens], out[tokens]
        kernels, table, lengths = self.kernels, step.block_table, step.seq_lens
        (cache,) = self.caches
        if phase == "decode":
            plan = self.group.once(kernels.decode, self, lambda: kernels.plan(step))
            absorbed = kernels.absorb(q, kv_up)
            latents = kernels.decode(
                absorbed, cache, table, lengths, step.max_seq_len, self.scale, plan
            )
            kernels.project(latents, kv_up, out)
        else:
            kernels.prefill(
                q,
                cache,
                kv_up,
                step.query_start,
                lengths,
                table,
                step.host_query_start,
                step.host_seq_lens,
                self.max_expanded,
                self.scale,
                out,
            )
