"""The attention function that models of transformers call: a layer's attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tokenspeed_core.api import AttentionCall, BuildContext, Rotation
from tokenspeed_models.weights import Shard
from tokenspeed_models_transformers.describe import group_name
from tokenspeed_models_transformers.recording import Mask, RecordedAttention, observe

SERVE = "tokenspeed"  # the implementation of attention and experts while serving


class PagedAttention:
    """One recorded call of the attention function, bound to its KV cache.

    The first call is compared with the recording.
    """

    def __init__(self, call: AttentionCall, recorded: RecordedAttention) -> None:
        self.recorded = recorded
        self.attend = call
        self._is_checked = False

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: object,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Attend for a module. q, k, v are [1, heads, T, size]; returns [1, T, H, value size]."""
        if not self._is_checked:
            self._check(module, q, k, v, mask, arguments)
        return self.attend(*(_by_token(each) for each in (q, k, v))).unsqueeze(0)

    def _check(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: object,
        arguments: dict[str, Any],
    ) -> None:
        """Raise RuntimeError if the model calls its attention differently from the recording."""
        recorded = self.recorded
        if mask is None:
            mask = Mask(recorded.window, recorded.is_bidirectional)
        seen = observe(recorded.module, module, q, k, v, mask, arguments)
        if seen != self.recorded:
            raise RuntimeError(
                f"{self.recorded.module} called its attention with {seen}. The recorded call was {self.recorded}."
            )
        self._is_checked = True


class _SuccessiveCalls:
    """The attention of a module that calls the function several times in a forward."""

    def __init__(self, calls: Sequence[PagedAttention]) -> None:
        self._calls = calls
        self._next = 0

    def __call__(self, *arguments: Any) -> Tensor:
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        return call(*arguments)


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """The bound attention calls, the calls of modules that are replaced as a whole, and float32 copies of sinks.

    The sinks have the paths of their parameters.
    """

    paged: list[PagedAttention]
    calls: dict[str, AttentionCall]
    sinks: dict[str, Tensor]


def bind_attention(
    model: PreTrainedModel,
    recorded: Sequence[RecordedAttention],
    rotations: Mapping[str, Rotation | None],
    build: BuildContext,
) -> BoundAttention:
    """Give each module that calls the attention function its layers of the KV cache.

    The modules in `rotations`, which have the rotation of each, get none: their calls are returned. Calls have this
    process's heads.
    """

    def local(num_heads: int, module: str) -> int:
        return Shard(0, "attn", num_heads).local_size(module, num_heads, build.group)

    calls: dict[str, list[PagedAttention]] = {}
    bound_attention = BoundAttention([], {}, {})
    for layer, each in enumerate(recorded):
        sinks = None
        if each.sinks is not None:
            sinks = torch.empty(each.num_heads, dtype=torch.float32, device=build.device)
            bound_attention.sinks[each.sinks] = sinks
        call = build.attention(
            layer=layer,
            num_heads=local(each.num_heads, each.module),
            num_kv_heads=local(each.num_kv_heads, each.module),
            head_size=each.head_size,
            scale=each.scale,
            window=each.window,
            is_bidirectional=each.is_bidirectional,
            soft_cap=each.soft_cap,
            sinks=sinks,
            value_head_size=each.value_size,
            group=group_name((each.num_kv_heads, each.head_size, each.value_size, each.window)),
            rotation=rotations.get(each.module),
        )
        if each.module in rotations:
            bound_attention.calls[each.module] = call
            continue
        paged = PagedAttention(call, each)
        bound_attention.paged.append(paged)
        calls.setdefault(each.module, []).append(paged)
    for name, bound in calls.items():
        module = model.get_submodule(name)
        module.tokenspeed_attention = bound[0] if len(bound) == 1 else _SuccessiveCalls(bound)
    return bound_attention


def _by_token(x: Tensor) -> Tensor:
    """Return [T, heads, size] for [1, heads, T, size], with adjacent heads."""
    x = x[0].transpose(0, 1)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: object = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers calls it."""
    return module.tokenspeed_attention(module, q, k, v, attention_mask, arguments), None  # type: ignore[operator]


# No mask function has this name, so that transformers makes no mask.
AttentionInterface.register(SERVE, _attend)
