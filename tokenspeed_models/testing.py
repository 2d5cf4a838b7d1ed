"""Runs a model family without an engine: plain torch ops and a dense KV cache of one sequence.

For tests of families. The ops here share no code with any kernel, and check the problems that a family passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import (
    ONE_PROCESS,
    AttentionCall,
    Collective,
    ExpertBalance,
    FusedCollective,
    LatentAttentionCall,
    LatentSizes,
    Model,
    ParallelLayout,
    ProcessGroup,
    QuantizationScheme,
    Rotation,
    TokenCounts,
)


class DenseBuild:
    """A `BuildContext` with plain torch ops and a growing KV cache of one sequence.

    `problems` records each op that the model requested, with its problem.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        layout: ParallelLayout = ONE_PROCESS,
    ) -> None:
        self.dtype, self.device, self._layout = dtype, torch.device(device), layout
        self.max_model_len = 1 << 30
        self.expert_balance: ExpertBalance | None = None
        self.routes_tokens = False
        self.token_counts = TokenCounts(layout.group("data").size)
        self.problems: list[tuple[str, dict[str, Any]]] = []
        self.caches: dict[int, _DenseAttention | _DenseLatentAttention] = {}

    def group(self, name: str) -> ProcessGroup:
        """Return a process group of the layout."""
        return self._layout.group(name)

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layer indices."""
        yield from range(num_layers)

    def scheme(self, layer: str) -> QuantizationScheme | None:
        """Return None: no linear layer is quantized."""
        return None

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return a plain torch implementation of an op. Raises ValueError if the problem has wrong axes."""
        self.problems.append((op, problem))
        function, axes = _OPS[op]
        if set(problem) != {*axes, "dtype"}:
            raise ValueError(
                f"op {op!r} got the axes {sorted(problem)}, expected {sorted((*axes, 'dtype'))}"
            )
        return partial(function, problem) if op in _WITH_PROBLEM else function

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return None: models use the separate ops instead."""
        return None

    def side_stream(self) -> None:
        """Return None: one operation runs at a time."""

    def comm(self, collective: Collective) -> Callable[[Tensor], Tensor]:
        """Raise ValueError: this build runs one process."""
        raise ValueError(f"DenseBuild has no kernel for {collective.op}")

    def fused_comm(self, all_reduce: Collective) -> FusedCollective | None:
        """Return None: collectives run alone."""
        return None

    def attention(
        self,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        is_chunked: bool = False,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        value_head_size: int | None = None,
        is_bidirectional: bool = False,
        group: str = "full",
        rotation: Rotation | None = None,
    ) -> AttentionCall:
        """Return a layer's attention with its own cache."""
        self.problems.append(("attention", {"layer": layer, "window": window, "group": group}))
        rotate = (
            None
            if rotation is None
            else self.op(
                rotation.op,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                rotary_size=rotation.rotary_size,
                dtype=str(self.dtype).removeprefix("torch."),
            )
        )
        call = _DenseAttention(
            num_heads // num_kv_heads,
            scale,
            window,
            soft_cap,
            sinks,
            rotate,
            is_chunked=is_chunked,
            is_bidirectional=is_bidirectional,
        )
        self.caches[layer] = call
        return call

    def latent_attention(
        self, *, layer: int, sizes: LatentSizes, scale: float, group: str = "latent"
    ) -> LatentAttentionCall:
        """Return a layer's latent attention with its own cache."""
        self.problems.append(("latent_attention", {"layer": layer, "group": group}))
        call = _DenseLatentAttention(sizes, scale)
        self.caches[layer] = call
        return call

    def clear(self) -> None:
        """Forget the sequence."""
        for cache in self.caches.values():
            cache.clear()


def sequence_logits(
    model: Model, build: DenseBuild, token_ids: list[int], chunk: int | None = None
) -> Tensor:
    """Return the logits [T, vocab] of a sequence, computed in chunks of `chunk` tokens (None: all at once)."""
    build.clear()
    ids = torch.tensor(token_ids, device=build.device)
    positions = torch.arange(len(token_ids), device=build.device)
    step = chunk or len(token_ids)
    parts = [
        model.logits(
            model.forward(ids[start : start + step], positions[start : start + step], None)
        )
        for start in range(0, len(token_ids), step)
    ]
    return torch.cat(parts)


class _DenseAttention:
    """Attention over all keys of one sequence, or over the last `window` keys. The first call may see later keys."""

    def __init__(
        self,
        num_repeats: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
        rotate: Callable[..., None] | None,
        *,
        is_chunked: bool = False,
        is_bidirectional: bool = False,
    ) -> None:
        self.is_chunked, self.is_bidirectional = is_chunked, is_bidirectional
        self.num_repeats, self.scale, self.window, self.rotate = num_repeats, scale, window, rotate
        self.soft_cap, self.sinks = soft_cap, sinks
        self.clear()

    def clear(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def write(self, q: Tensor, k: Tensor, v: Tensor, *rotation: Any) -> None:
        if self.rotate is not None:
            self.rotate(q, k, *rotation)
        self.keys.append(k.clone())
        self.values.append(v.clone())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rotation: Any) -> Tensor:
        self.write(q, k, v, *rotation)
        keys = torch.cat(self.keys).repeat_interleave(self.num_repeats, dim=1)
        values = torch.cat(self.values).repeat_interleave(self.num_repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        num_keys = keys.shape[0]
        position, key = (
            torch.arange(num_keys - q.shape[0], num_keys)[:, None],
            torch.arange(num_keys),
        )
        is_prompt = self.is_bidirectional and len(self.keys) == 1
        hidden = (key > position) & (not is_prompt)
        if self.window is not None and self.is_chunked:
            hidden |= key < position // self.window * self.window
        elif self.window is not None:
            hidden |= (key - position).abs() >= self.window
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
        if self.sinks is not None:
            column = self.sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., :num_keys]
        return torch.einsum("hqk,khd->qhd", weights, values)


class _DenseLatentAttention:
    """Causal latent attention over all tokens of one sequence, with keys and values expanded for each head."""

    def __init__(self, sizes: LatentSizes, scale: float) -> None:
        self.sizes, self.scale = sizes, scale
        self.clear()

    def clear(self) -> None:
        self.entries: list[Tensor] = []

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
        sizes = self.sizes
        latent = _norm(kv[:, : sizes.latent_size], norm_weight, eps)
        shared = kv[:, None, sizes.latent_size :].clone()
        _rotate(q[..., sizes.nope_size :], shared, positions, cos_sin, interleaved)
        self.entries.append(torch.cat((latent, shared[:, 0]), dim=-1))
        latents, keys = torch.cat(self.entries).split_with_sizes(
            (sizes.latent_size, sizes.rope_size), dim=-1
        )
        expanded = torch.einsum("hdl,kl->hkd", kv_up, latents)
        nope, values = expanded.split_with_sizes((sizes.nope_size, sizes.value_size), dim=-1)
        scores = torch.einsum("qhd,hkd->hqk", q[..., : sizes.nope_size], nope)
        scores += torch.einsum("qhd,kd->hqk", q[..., sizes.nope_size :], keys)
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        future = future.triu(scores.shape[2] - scores.shape[1] + 1)
        weights = (scores * self.scale).masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,hkd->qhd", weights, values)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual += x
    return _norm(residual, weight, eps), residual


def _rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        if interleaved:
            pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
            heads.copy_(torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2))
            continue
        first, second = heads[..., : cos_sin.shape[1]].float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[..., : cos_sin.shape[1]] = rotated.to(heads.dtype)


def _norm_rotate(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
) -> None:
    q.copy_(_norm(q, q_weight, eps))
    k.copy_(_norm(k, k_weight, eps))
    _rotate(q, k, positions, cos_sin, interleaved)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _add_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.linear(_norm(total, norm_weight, eps), weight, bias), total


def _add_norm_linear_silu_mul(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    halves, total = _add_norm_linear(x, residual, norm_weight, eps, weight, bias)
    return _silu_mul(halves), total


def _add_norm_linear_gelu_tanh_mul(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    halves, total = _add_norm_linear(x, residual, norm_weight, eps, weight, bias)
    return _gelu_tanh_mul(halves), total


def _route(
    routing: Mapping[str, Any], logits: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Route one token after the other."""
    rows = [_route_token(routing, row, bias) for row in logits.double()]
    weights = logits.new_tensor([row[0] for row in rows], dtype=torch.float32)
    ids = logits.new_tensor([row[1] for row in rows], dtype=torch.int32)
    shape = logits.shape[0], routing["top_k"]
    return weights.view(shape), ids.view(shape)


def _route_token(
    routing: Mapping[str, Any], logits: Tensor, bias: Tensor | None
) -> tuple[list[float], list[int]]:
    score, top_k, num_groups = routing["score"], routing["top_k"], routing["num_groups"]
    scores = {
        "softmax": logits.softmax(0),
        "sigmoid": logits.sigmoid(),
        "top_k_softmax": logits,
    }[score].tolist()
    biases = [0.0] * len(scores) if bias is None else bias.tolist()
    ranking = [value + extra for value, extra in zip(scores, biases, strict=True)]
    size = len(scores) // num_groups
    num_best = 1 if routing["group_score"] == "max" else 2
    of_group = [
        sum(sorted(ranking[first : first + size])[-num_best:])
        for first in range(0, len(scores), size)
    ]
    groups = sorted(range(num_groups), key=lambda group: -of_group[group])[: routing["top_groups"]]
    allowed = [expert for expert in range(len(scores)) if expert // size in groups]
    ids = sorted(allowed, key=lambda expert: -ranking[expert])[:top_k]
    weights = [scores[expert] for expert in ids]
    if score == "top_k_softmax":
        weights = torch.tensor(weights).softmax(0).tolist()
    divisor = sum(weights) if routing["renormalize"] else 1.0
    return [weight / divisor * routing["scale"] for weight in weights], ids


def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    rows = []
    for token, row_weights, row_ids in zip(x, weights, ids.tolist(), strict=True):
        outs = torch.zeros_like(token)
        for weight, expert in zip(row_weights.to(x.dtype), row_ids, strict=True):
            if expert < len(down):
                outs += weight * (down[expert] @ _silu_mul(gate_up[expert] @ token))
        rows.append(outs)
    return torch.stack(rows) if rows else torch.empty_like(x)


def _biased_experts(
    problem: Mapping[str, Any],
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    exists = ids < len(down)
    weights, ids = weights * exists, ids * exists
    both = torch.einsum("tn,tkon->tko", x, gate_up[ids]) + gate_up_bias[ids]
    gate = both[..., ::2].clamp(max=problem["limit"])
    up = both[..., 1::2].clamp(-problem["limit"], problem["limit"])
    hidden = gate * torch.sigmoid(problem["alpha"] * gate) * (up + 1)
    outs = torch.einsum("tki,tkni->tkn", hidden, down[ids]) + down_bias[ids]
    return (weights.to(x.dtype).unsqueeze(2) * outs).sum(1)


_HEADS = ("num_heads", "num_kv_heads", "head_size", "rotary_size")
_WITH_PROBLEM = ("moe_route", "moe_biased_experts")
_OPS: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rms_norm": (_norm, ("size",)),
    "add_rms_norm": (_add_norm, ("size",)),
    "rope": (_rotate, _HEADS),
    "qk_norm_rope": (_norm_rotate, _HEADS),
    "silu_mul": (_silu_mul, ("size",)),
    "gelu_tanh_mul": (_gelu_tanh_mul, ("size",)),
    "linear": (functional.linear, ("in_size", "out_size")),
    "add_rms_norm_linear": (_add_norm_linear, ("in_size", "out_size")),
    "add_rms_norm_linear_silu_mul": (_add_norm_linear_silu_mul, ("in_size", "out_size")),
    "add_rms_norm_linear_gelu_tanh_mul": (_add_norm_linear_gelu_tanh_mul, ("in_size", "out_size")),
    "moe_route": (
        _route,
        (
            "num_experts",
            "top_k",
            "score",
            "renormalize",
            "scale",
            "num_groups",
            "top_groups",
            "group_score",
            "has_bias",
        ),
    ),
    "moe_logits": (lambda x, weight: x.float() @ weight.T, ("num_experts", "hidden_size")),
    "moe_experts": (_experts, ("num_experts", "top_k", "hidden_size", "intermediate_size")),
    "moe_biased_experts": (
        _biased_experts,
        ("num_experts", "top_k", "hidden_size", "intermediate_size", "alpha", "limit"),
    ),
}
