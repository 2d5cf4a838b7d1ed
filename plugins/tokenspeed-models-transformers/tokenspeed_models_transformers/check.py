"""Compares a loaded model with transformers: eight tokens, with the real weights.

Recording shows how a model calls attention, but not whether tokens influence each other in another way, such as
through a convolution. Therefore the model runs twice here: in two chunks as in serving, with attention computed by
plain PyTorch, and as in transformers, without replaced modules and without a cache. A prompt whose tokens see later
ones cannot be computed in chunks. Such a model is compared with transformers in one pass, and then with itself, in other
chunks after a prompt of one token. The output head, replaced and original, runs on the same hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenspeed_models_transformers.attention import SERVE, PagedAttention
from tokenspeed_models_transformers.projections import FusedAttention, rotated
from tokenspeed_models_transformers.recording import RecordedAttention, is_prefix_lm
from tokenspeed_models_transformers.stacked import ALL_REDUCE, QUANTIZED, Summed

log = logging.getLogger("tokenspeed.models")

_NUM_TOKENS = 8
# Largest norm of the difference over the norm of the hidden states. In 16 bits, deep models and routers near a tie
# differ by some percent, and so does rounding of quantized activations; another formula differs by more than half.
_TOLERANCE = 1e-2
_ROUNDING_TOLERANCE = 0.3

Attention = PagedAttention | FusedAttention


@torch.inference_mode()
def check_against_transformers(
    causal_lm: PreTrainedModel,
    decoder: PreTrainedModel,
    logits: Callable[[Tensor], Tensor],
    attention: Sequence[Attention],
    sinks: Mapping[str, Tensor],
    *,
    keeps_layers: bool,
    is_quantized: bool,
) -> None:
    """Raise ValueError if a loaded model computes something else than transformers.

    `causal_lm` is the model without its decoder, and `logits` computes logits [R, vocab] of hidden states [R, hidden].
    `attention` are all of the layers' calls, `sinks` the float32 sinks by the paths of their parameters. Layers of
    TokenSpeed that replace quantized ones, or experts that processes share, stay in place; `keeps_layers` says whether
    there are any. All processes call this at the same time.
    """
    weight = next(decoder.parameters())
    vocab_size = decoder.config.get_text_config().vocab_size
    ids = torch.arange(1, _NUM_TOKENS + 1, device=weight.device) * 7 % vocab_size
    positions = torch.arange(_NUM_TOKENS, device=weight.device)

    def run(start: int, end: int, **others: Tensor) -> Tensor:
        outputs = decoder(
            input_ids=ids[start:end].unsqueeze(0),
            position_ids=positions[start:end].unsqueeze(0),
            use_cache=False,
            **others,
        )
        hidden: Tensor = outputs[0][0]
        return hidden

    def run_chunks(*ends: int) -> Tensor:
        with _dense(attention, sinks):
            return torch.cat([run(start, end) for start, end in pairwise((0, *ends, _NUM_TOKENS))])

    is_bidirectional = any(each.recorded.is_bidirectional for each in attention)
    ours = run_chunks() if is_bidirectional else run_chunks(3)
    types = (
        {"token_type_ids": torch.ones_like(ids).unsqueeze(0)}
        if is_prefix_lm(decoder.config)
        else {}
    )
    try:
        with _unchanged(decoder, SERVE if keeps_layers else "eager"), _original_forwards(causal_lm):
            theirs = run(0, _NUM_TOKENS, **types)
            their_logits = logits(ours)
    except Exception as error:  # code of a repository may raise anything
        log.warning("the model could not be compared with transformers: %r", error)
        return
    is_exact = weight.dtype == torch.float32 and not is_quantized
    tolerance = _TOLERANCE if is_exact else _ROUNDING_TOLERANCE
    outside = "Its tokens may influence each other outside of attention, or it ignores positions"
    compared = [
        (ours, theirs, "hidden states in two chunks", "those of transformers in one pass", outside)
    ]
    if is_bidirectional:
        mask = "It may use a different attention mask"
        two, three = run_chunks(1), run_chunks(1, 4)
        compared = [
            (ours, theirs, "hidden states in one pass", "those of transformers", mask),
            (three, two, "hidden states in three chunks", "those in two", outside),
        ]
    head = "It may use an unknown kind of output head"
    compared.append((logits(ours), their_logits, "logits", "those of transformers", head))
    for found, expected, what, others, reason in compared:
        distance = (found.float() - expected.float()).norm() / expected.float().norm()
        if distance > tolerance:
            raise ValueError(
                f"{type(causal_lm).__name__} cannot run through transformers: its {what} differ by "
                f"{float(distance):.1%} from {others}. {reason}"
            )


@contextmanager
def _dense(attention: Sequence[Attention], sinks: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the layers attend to the tokens seen since, without the engine's KV cache."""
    calls = [each.attend for each in attention]
    for each in attention:
        path = each.recorded.sinks
        each.attend = _DenseAttention(each.recorded, None if path is None else sinks[path])
    try:
        yield
    finally:
        for each, call in zip(attention, calls, strict=True):
            each.attend = call


@contextmanager
def _unchanged(decoder: PreTrainedModel, experts: str) -> Iterator[None]:
    """Let a decoder compute as transformers defines it, with an implementation of experts."""
    config = decoder.config
    names = config._attn_implementation, config._experts_implementation
    config._attn_implementation, config._experts_implementation = "eager", experts
    try:
        with _original_forwards(decoder):
            yield
    finally:
        config._attn_implementation, config._experts_implementation = names


@contextmanager
def _original_forwards(model: PreTrainedModel) -> Iterator[None]:
    """Let modules compute what their classes define, except for layers of TokenSpeed that hold the weights."""
    replaced: list[tuple[dict[str, Any], Any]] = []
    for module in model.modules():
        attributes = vars(module)
        if "forward" not in attributes:
            continue
        replaced.append((attributes, attributes.pop("forward")))
        own = attributes.get(QUANTIZED)
        if ALL_REDUCE in attributes:
            own = Summed(own or module.forward, attributes[ALL_REDUCE])
        if own is not None:
            attributes["forward"] = own
    try:
        yield
    finally:
        for attributes, forward in replaced:
            attributes["forward"] = forward


class _DenseAttention:
    """Attention of one sequence over all keys so far, in float32. The first call computes the prompt."""

    def __init__(self, recorded: RecordedAttention, sinks: Tensor | None) -> None:
        self._recorded, self._sinks = recorded, sinks
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def write(self, q: Tensor, k: Tensor, v: Tensor, *rotation: Any) -> None:
        """Keep keys and values as `AttentionCall.write` does."""
        self._write(q, k, v, rotation)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rotation: Any) -> Tensor:
        """Attend as `AttentionCall` does."""
        q = self._write(q, k, v, rotation)
        num_groups = q.shape[1] // k.shape[1]
        keys, values = (
            torch.cat(each).repeat_interleave(num_groups, dim=1)
            for each in (self._keys, self._values)
        )
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self._recorded.scale
        cap, window = self._recorded.soft_cap, self._recorded.window
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(len(keys), device=q.device)
        distances = places[-len(q) :].unsqueeze(1) - places
        is_prompt = self._recorded.is_bidirectional and len(self._keys) == 1
        hidden = (distances < 0) & (not is_prompt)
        if window is not None:
            hidden |= distances.abs() >= window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self._sinks is not None:
            column = self._sinks.view(-1, 1, 1).expand(-1, len(q), 1)
            scores = torch.cat((scores, column), dim=-1)
        shares = scores.softmax(dim=-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", shares, values).to(v.dtype).contiguous()

    def _write(self, q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Any, ...]) -> Tensor:
        """Keep rotated keys, and values. Returns the rotated queries."""
        if rotation:
            *norms, _, table, interleaved = rotation
            if norms:
                *weights, eps = norms
                q, k = (
                    torch.rms_norm(x, weight.shape, weight, eps)
                    for x, weight in zip((q, k), weights, strict=True)
                )
            q, k = (rotated(x, table, interleaved=interleaved) for x in (q, k))
        self._keys.append(k.float())
        self._values.append(v.float())
        return q
