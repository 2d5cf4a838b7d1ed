"""Records a transformers model's calls of its attention function, by running it on the meta device.

A forward on the meta device computes shapes only. It takes well under a second for a model of any size, and fails if
the model's control flow depends on values, which a CUDA graph could not capture either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

RECORD = "tokenspeed_record"  # the implementation of attention and experts in a recorded forward
_NUM_TOKENS = 3
# Arguments that do not change the result of causal attention during inference.
_IGNORED = frozenset(("dropout", "position_ids", "use_cache", "cache_position", "is_causal"))
_UNDERSTOOD = frozenset(("scaling", "sliding_window", "softcap", "s_aux"))
_FAR = 1 << 20  # a position beyond every window


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """One call of the attention function. `module` is the path of the calling module in the model.

    `window` is the number of tokens that a query sees, its own included, or None for all. `soft_cap` limits the scores.
    `sinks` is the path of the parameter with a score for each head that joins the softmax.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: str | None


@dataclass(frozen=True, slots=True)
class Recording:
    """The attention calls of a forward, in order, and the path of the module that returns the hidden states.

    `experts` has the number of experts per token for each module with experts.
    """

    attention: tuple[RecordedAttention, ...]
    experts: Mapping[str, int]
    decoder: str


class UnsupportedModelError(ValueError):
    """A model cannot run on a paged KV cache. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Takes the place of a mask tensor in a recorded forward."""

    window: int | None


def record(model: PreTrainedModel) -> Recording:
    """Run a model that was built on the meta device with the attention implementation `RECORD`.

    Raises UnsupportedModelError.
    """
    names = {module: name for name, module in model.named_modules()}
    calls: list[RecordedAttention] = []
    experts: dict[str, int] = {}
    decoders: list[str] = []

    def note_attention(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: object = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        calls.append(observe(names[module], module, q, k, v, attention_mask, arguments))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    def note_experts(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts[names[module]] = ids.shape[1]
        return torch.empty_like(x)

    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    # With a mask of the batch's padding, transformers does not compare positions in search of packed sequences.
    padding = torch.ones_like(ids)
    AttentionInterface.register(RECORD, note_attention)
    ALL_EXPERTS_FUNCTIONS.register(RECORD, note_experts)
    with _hooks(model, names, decoders), torch.inference_mode():
        try:
            model(input_ids=ids, position_ids=ids, attention_mask=padding, use_cache=False)
        except UnsupportedModelError:
            raise
        except (NotImplementedError, RuntimeError, TypeError, AttributeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedModelError(
                f"{type(model).__name__} changes its attention mask, or its control flow depends on values of tensors: {reason}"
            ) from error
    if not calls:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not call the attention interface of transformers"
        )
    if not decoders:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder that takes input_ids and returns hidden states"
        )
    return Recording(tuple(calls), experts, decoders[0])


def observe(
    path: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: object,
    arguments: Mapping[str, Any],
    window: int | None = None,
) -> RecordedAttention:
    """Return the record of a call of the attention function by the module at `path`. q, k, v are [1, heads, T, size].

    `window` is that of the mask if no mask was made. Raises UnsupportedModelError.
    """
    for name, value in arguments.items():
        if value is None or value is False or name in _IGNORED or name in _UNDERSTOOD:
            continue
        raise UnsupportedModelError(
            f"{path}: the argument {name} of its attention is not supported"
        )
    if arguments.get("is_causal") is False:
        raise UnsupportedModelError(f"{path}: bidirectional attention is not supported")
    if mask is not None and not isinstance(mask, _Mask):
        raise UnsupportedModelError(f"{path}: the model creates or changes its attention mask")
    if k.shape[2] != q.shape[2]:
        raise UnsupportedModelError(f"{path}: cross attention is not supported")
    # The mask counts: not all models pass its window, and some pass a window that they do not use.
    window = mask.window if isinstance(mask, _Mask) else window
    scale, soft_cap, sinks = (arguments.get(name) for name in ("scaling", "softcap", "s_aux"))
    owned = [name for name, each in module._parameters.items() if each is sinks]
    if sinks is not None and not owned:
        raise UnsupportedModelError(f"{path}: the sinks of its attention are not a parameter")
    return RecordedAttention(
        module=path,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_size=q.shape[3],
        value_size=v.shape[3],
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=None if sinks is None else f"{path}.{owned[0]}",
    )


def _make_mask(mask_function: Callable[..., Tensor], **arguments: Any) -> _Mask:
    """Return the window of a mask function. Raises UnsupportedModelError unless it is causal, with or without one."""
    keys = torch.arange(_FAR + 3)
    windows = []
    for query in (_FAR, _FAR + 1):
        try:
            seen = mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)
        except (RuntimeError, IndexError, NotImplementedError) as error:
            raise UnsupportedModelError(
                "an attention mask that depends on the batch, such as that of chunked attention, is not supported"
            ) from error
        places = seen.expand(keys.shape).nonzero().flatten()
        first, last = int(places[0]), int(places[-1])
        if last != query or len(places) != last - first + 1:
            raise UnsupportedModelError("an attention mask that is not causal is not supported")
        windows.append(None if first == 0 else query - first + 1)
    if windows[0] != windows[1]:
        raise UnsupportedModelError("chunked attention is not supported")
    return _Mask(windows[0])


# transformers checks the names of implementations when a model is built.
AttentionInterface.register(RECORD, lambda *arguments, **keywords: None)
AttentionMaskInterface.register(RECORD, _make_mask)
ALL_EXPERTS_FUNCTIONS.register(RECORD, lambda *arguments: None)


@contextmanager
def _hooks(
    model: PreTrainedModel, names: Mapping[nn.Module, str], decoders: list[str]
) -> Iterator[None]:
    """Note which inner models are called with token ids."""

    def note_call(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else keywords.get("input_ids")
        if isinstance(ids, Tensor) and ids.dtype == torch.int64:
            decoders.append(names[module])

    handles = [
        module.register_forward_pre_hook(note_call, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and module is not model
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
