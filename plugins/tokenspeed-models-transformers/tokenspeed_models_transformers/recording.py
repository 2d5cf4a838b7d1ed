"""Records a transformers model's calls of its attention function, by running it on the meta device.

A forward on the meta device computes shapes only. It takes well under a second for a model of any size, and fails if
the model's control flow depends on values, which a CUDA graph could not capture either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

RECORD = "tokenspeed_record"  # the implementation of attention and experts in a recorded forward
_NUM_TOKENS = 3
# Arguments that do not change the result of causal attention during inference.
_IGNORED = frozenset(
    ("dropout", "position_ids", "use_cache", "cache_position", "is_causal", "logits_to_keep")
)
_UNDERSTOOD = frozenset(("scaling", "sliding_window", "softcap", "s_aux"))
_MAX_MESSAGE = 200  # characters
_FAR = 1 << 20  # a position beyond every window


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """One call of the attention function. `module` is the path of the calling module in the model.

    `window` is the number of tokens that a query sees, its own included, or None for all. If it `is_bidirectional`,
    tokens of a prompt see as many later ones too. `soft_cap` limits the scores. `sinks` is the path of the parameter
    with a score for each head that joins the softmax.
    """

    module: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    is_bidirectional: bool
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


def one_line(error: Exception) -> str:
    """Return the class and the beginning of the message of an exception."""
    return f"{type(error).__name__}: {shorten(str(error), _MAX_MESSAGE)}"


@dataclass(frozen=True, slots=True)
class Mask:
    """Takes the place of a mask tensor. The fields are those of `RecordedAttention`.

    `unsupported` says why a layer cannot use the mask. Some models create masks that none of their layers uses.
    """

    window: int | None = None
    is_bidirectional: bool = False
    unsupported: str | None = None

    def __getitem__(self, index: object) -> Mask:
        """Return the mask if the index selects all of it. Layers that share keys may compute some queries only."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(each not in (slice(None), slice(0, None)) for each in parts):
            raise TypeError(f"{Mask.__name__!r} object cannot be divided")
        return self


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
    # If there is a padding mask, transformers does not compare positions to find packed sequences. Hybrid models read
    # its values, so it is not on the meta device.
    padding = torch.ones(ids.shape, dtype=torch.int64)
    AttentionInterface.register(RECORD, note_attention)
    ALL_EXPERTS_FUNCTIONS.register(RECORD, note_experts)
    with _hooks(model, names, decoders), torch.inference_mode():
        try:
            model(input_ids=ids, position_ids=ids, attention_mask=padding, use_cache=False)
        except UnsupportedModelError:
            raise
        except Exception as error:  # may be of any type if the configuration is incomplete
            raise UnsupportedModelError(_reason(error)) from error
    if not calls:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not call the attention interface of transformers"
        )
    if not decoders:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no decoder that takes input_ids and returns hidden states"
        )
    if is_prefix_lm(model.config):
        calls = [replace(each, is_bidirectional=True) for each in calls]
    _check_direction(model.config.get_text_config(), calls)
    return Recording(tuple(calls), experts, decoders[0])


def _reason(error: Exception) -> str:
    """Return why a recorded forward failed with an exception."""
    message = str(error)
    # Only the padding mask is not on the meta device, so it causes errors about different devices.
    if f"'{Mask.__name__}'" in message or "device meta" in message:
        return "it uses its attention mask outside of the attention interface of transformers"
    if "meta tensor" in message or "register_meta" in message:
        return "its control flow depends on values of tensors, which CUDA graphs cannot capture"
    return f"its forward failed with {one_line(error)}"


def is_prefix_lm(config: PreTrainedConfig) -> bool:
    """Whether tokens of the type 1, those of a prompt, see each other.

    Only models that declare `prefix_lm` build their mask from it; any other configuration may have it as an extra key.
    """
    text = config.get_text_config()
    return hasattr(type(text), "prefix_lm") and bool(text.prefix_lm)


def _check_direction(config: PreTrainedConfig, calls: Iterable[RecordedAttention]) -> None:
    """Raise UnsupportedModelError unless masks are bidirectional exactly if the configuration asks for it.

    Encoders have such masks too, but generate without a cache.
    """
    if getattr(config, "prefix_lm", False) and not is_prefix_lm(config):
        raise UnsupportedModelError(
            f"the configuration has prefix_lm, which models of the type {config.model_type} do not use"
        )
    is_wanted = (
        is_prefix_lm(config)
        or getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", None) is False
    )
    if any(each.is_bidirectional for each in calls) == is_wanted:
        return
    raise UnsupportedModelError(
        "the configuration asks for bidirectional attention, but the attention mask is causal"
        if is_wanted
        else "an attention mask that is not causal is not supported in an encoder"
    )


def observe(
    path: str,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: object,
    arguments: Mapping[str, Any],
) -> RecordedAttention:
    """Return the record of a call of the attention function by the module at `path`. q, k, v are [1, heads, T, size].

    Raises UnsupportedModelError.
    """
    for name, value in arguments.items():
        if value is None or value is False or name in _IGNORED or name in _UNDERSTOOD:
            continue
        raise UnsupportedModelError(
            f"{path}: the argument {name} of its attention is not supported"
        )
    mask = Mask() if mask is None else mask
    if not isinstance(mask, Mask):
        raise UnsupportedModelError(f"{path}: the model creates or changes its attention mask")
    if mask.unsupported is not None:
        raise UnsupportedModelError(f"{path}: {mask.unsupported}")
    if arguments.get("is_causal") is False and not mask.is_bidirectional:
        raise UnsupportedModelError(f"{path}: its attention is not causal, but its mask is")
    if k.shape[2] != q.shape[2]:
        raise UnsupportedModelError(f"{path}: cross attention is not supported")
    # The mask counts: not all models pass its window, and some pass a window that they do not use.
    window = mask.window
    if mask.is_bidirectional and window != arguments.get("sliding_window"):
        raise UnsupportedModelError(
            f"{path}: tokens of its prompts see {window} tokens on each side, those that it generates "
            f"{arguments.get('sliding_window')}. Bidirectional attention with two windows is not supported"
        )
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
        is_bidirectional=mask.is_bidirectional,
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=None if sinks is None else f"{path}.{owned[0]}",
    )


def _make_mask(mask_function: Callable[..., Tensor], **arguments: Any) -> Mask:
    """Return the `Mask` of a mask function, which is unsupported if its window depends on the query's position."""
    first, second = (_seen_from(query, mask_function) for query in (_FAR, _FAR + 1))
    return first if first == second else Mask(unsupported="chunked attention is not supported")


def _seen_from(query: int, mask_function: Callable[..., Tensor]) -> Mask:
    """Return the `Mask` of one query far from both ends: its window, and whether it sees as many later keys."""
    keys = torch.arange(2 * _FAR)
    try:
        seen = mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)
    except (RuntimeError, IndexError, NotImplementedError):
        return Mask(
            unsupported="an attention mask that depends on the batch, such as that of chunked attention, is not supported"
        )
    places = seen.expand(keys.shape).nonzero().flatten()
    if not len(places):
        return Mask(unsupported="an attention mask that hides all tokens is not supported")
    first, last = int(places[0]), int(places[-1])
    window = None if first == 0 else query - first + 1
    last_seen = len(keys) - 1 if window is None else query + window - 1
    if last not in (query, last_seen) or len(places) != last - first + 1:
        return Mask(
            unsupported="an attention mask that is neither causal nor symmetric is not supported"
        )
    return Mask(window, last != query)


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
