"""Attention modules that run on TokenSpeed's kernels, with their projections, norms and rotation.

The usual module projects queries, keys and values, may normalize and rotate their heads, attends, and projects the
result. It becomes one GEMM, one kernel that normalizes, rotates and writes the cache, attention, and one GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenspeed_core.api import AttentionCall, BuildContext, Rotation
from tokenspeed_models.weights import Shard
from tokenspeed_models_transformers.compare import (
    MAGNITUDES,
    copied,
    random_linear,
    random_tensor,
    rms_norm_eps,
    same,
)
from tokenspeed_models_transformers.recording import RecordedAttention
from tokenspeed_models_transformers.stacked import Stacked, Summed

_SMALL = 8  # features of the random inputs of comparisons
_NUM_TOKENS = 3
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class RotaryLayout:
    """How a model stores cosines and sines, and which elements of a head it rotates together.

    Each angle occurs twice: in both halves, or in adjacent places (`is_adjacent`). `interleaved` is as in the op
    `rope`.
    """

    is_adjacent: bool
    interleaved: bool

    def table(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the rows that `rope` takes, float32 [T, R], for cosines and sines [1, T, R]."""
        half = cos.shape[2] // 2
        chosen = slice(0, None, 2) if self.is_adjacent else slice(half)
        return torch.cat((cos[0, :, chosen], sin[0, :, chosen]), dim=-1).float()


_LAYOUTS = tuple(
    RotaryLayout(is_adjacent, interleaved)
    for is_adjacent in (False, True)
    for interleaved in (False, True)
)


@dataclass(frozen=True, slots=True)
class UsualAttention:
    """An attention module that can be replaced. `layout` is None without rotation; `eps` belongs to its head norms."""

    module: Any
    recorded: RecordedAttention
    layout: RotaryLayout | None
    rotary_size: int
    eps: float | None

    @property
    def rotation(self) -> Rotation | None:
        """The rotation to register."""
        if self.layout is None:
            return None
        return Rotation("rope" if self.eps is None else "qk_norm_rope", self.rotary_size)

    @property
    def shards(self) -> tuple[Shard, Shard]:
        """How query heads, and key and value heads, are divided between processes."""
        heads = self.recorded
        return Shard(0, "attn", heads.num_heads), Shard(0, "attn", heads.num_kv_heads)

    def on_one_process(self, build: BuildContext) -> RecordedAttention:
        """Return the call of the attention function with this process's heads. Raises ValueError."""
        heads, kv_heads = self.shards
        each = self.recorded
        return replace(
            each,
            num_heads=heads.local_size(each.module, each.num_heads, build.group),
            num_kv_heads=kv_heads.local_size(each.module, each.num_kv_heads, build.group),
        )


@torch.no_grad()
def find_usual_attention(
    model: PreTrainedModel, decoder: str, recorded: Sequence[RecordedAttention]
) -> dict[str, UsualAttention]:
    """Return the attention modules of a model that match, by their paths."""
    names = [each.module for each in recorded]
    angles = _random_angles(getattr(model.get_submodule(decoder), "rotary_emb", None))
    found = {}
    for each in recorded:
        if names.count(each.module) > 1 or each.value_size != each.head_size:
            continue
        usual = _match(model.get_submodule(each.module), each, angles)
        if usual is not None:
            found[each.module] = usual
    return found


def _random_angles(rotary: nn.Module | None) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines [1, T, R] of random frequencies, in the layout of a rotary embedding."""
    frequencies = getattr(rotary, "inv_freq", None)
    if rotary is None or not isinstance(frequencies, Tensor):
        return None
    small = copied(rotary, inv_freq=random_tensor(*frequencies.shape, seed=3))
    positions = torch.arange(_NUM_TOKENS).unsqueeze(0) + 1
    try:
        cos, sin = small.forward(random_tensor(1, _NUM_TOKENS, _SMALL, seed=4), positions)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return None
    is_usual = isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.shape == sin.shape
    return (cos, sin) if is_usual and cos.dim() == 3 and cos.shape[2] % 2 == 0 else None


def _match(
    module: nn.Module, recorded: RecordedAttention, angles: tuple[Tensor, Tensor] | None
) -> UsualAttention | None:
    """Return the parts of a module that computes the usual formula, else None.

    A copy of the module with random weights is compared with the formula on the CPU.
    """
    layers: dict[str, Any] = dict(module.named_children())
    eps: float | None = None
    norms = set(layers) - set(_NAMES)
    if any(type(layers.get(name)) is not nn.Linear for name in _NAMES) or module._parameters:
        return None
    size, num_heads, num_kv_heads = (
        recorded.head_size,
        recorded.num_heads,
        recorded.num_kv_heads,
    )
    widths = {"q_proj": num_heads * size, "k_proj": num_kv_heads * size}
    widths["v_proj"] = widths["k_proj"]
    if any(layers[name].out_features != width for name, width in widths.items()):
        return None
    if len({layers[name].bias is None for name in widths}) > 1:
        return None
    changes: dict[str, Any] = {
        name: random_linear(_SMALL, width, seed, bias=layers[name].bias is not None)
        for seed, (name, width) in enumerate(widths.items(), 11)
    }
    has_bias = layers["o_proj"].bias is not None
    changes["o_proj"] = random_linear(widths["q_proj"], _SMALL, 15, bias=has_bias)
    weights: tuple[Tensor, Tensor] | None = None
    if norms:
        if norms != {"q_norm", "k_norm"}:
            return None
        epsilons = {rms_norm_eps(layers[name]) for name in norms}
        lengths = {layers[name].weight.numel() for name in norms if epsilons != {None}}
        if len(epsilons) > 1 or lengths != {size}:
            return None
        (eps,) = epsilons
        weights = random_tensor(size, seed=16), random_tensor(size, seed=17)
        for name, weight in zip(("q_norm", "k_norm"), weights, strict=True):
            changes[name] = copied(layers[name], weight=nn.Parameter(weight, requires_grad=False))
    layouts: list[RotaryLayout | None] = [*_LAYOUTS] if angles is not None else []
    if not norms:
        layouts.append(None)
    # If the form of the rotary embedding is unknown, the module must ignore its cosines and sines.
    given = angles
    if given is None:
        cos, sin = (random_tensor(1, _NUM_TOKENS, size, seed=seed) for seed in (19, 20))
        given = cos, sin
    for layout in layouts:
        if all(
            _computes(module, recorded, changes, weights, eps, layout, given, magnitude)
            for magnitude in MAGNITUDES
        ):
            width = 0 if angles is None else angles[0].shape[2]
            return UsualAttention(module, recorded, layout, width, eps)
    return None


def _computes(
    module: nn.Module,
    recorded: RecordedAttention,
    changes: dict[str, Any],
    weights: tuple[Tensor, Tensor] | None,
    eps: float | None,
    layout: RotaryLayout | None,
    angles: tuple[Tensor, Tensor],
    magnitude: float,
) -> bool:
    """Return whether the module passes the expected heads to its attention, and projects the result."""
    seen: list[tuple[Tensor, ...]] = []

    def attend(module: object, q: Tensor, k: Tensor, v: Tensor, *others: object) -> Tensor:
        seen.append((q, k, v))
        return q.transpose(1, 2) * 0.5

    x = random_tensor(1, _NUM_TOKENS, _SMALL, seed=18) * magnitude
    try:
        returned = copied(module, **changes, tokenspeed_attention=attend).forward(
            hidden_states=x, position_embeddings=angles, attention_mask=None
        )
        output, *others = returned
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return False
    if len(seen) != 1 or len(others) != 1:
        return False
    heads = []
    for name in ("q_proj", "k_proj", "v_proj"):
        heads.append(changes[name](x).view(_NUM_TOKENS, -1, recorded.head_size))
    if weights is not None:
        for index, weight in enumerate(weights):
            heads[index] = torch.rms_norm(heads[index], weight.shape, weight, eps)
    if layout is not None:
        table = layout.table(*angles)
        heads[:2] = [rotated(each, table, interleaved=layout.interleaved) for each in heads[:2]]
    expected = changes["o_proj"]((heads[0] * 0.5).flatten(1).unsqueeze(0))
    return same(output, expected) and all(
        same(each[0].transpose(0, 1), head) for each, head in zip(seen[0], heads, strict=True)
    )


def rotated(x: Tensor, table: Tensor, *, interleaved: bool) -> Tensor:
    """Return heads [T, H, D] with their first R elements rotated by a table [T, R]."""
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    turned, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(parts, dim=-1).flatten(2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((joined, rest), dim=-1)


class RotaryTables:
    """The rows of the current forward for `rope`, created when the first layer needs them."""

    def __init__(self, layout: RotaryLayout) -> None:
        self._layout = layout
        self._cos: Tensor | None = None
        self._arguments: tuple[Tensor, Tensor, bool]

    def arguments(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return rows, table and interleaving for the cosines and sines [1, T, R] that all layers get."""
        if cos is not self._cos:
            rows = torch.arange(cos.shape[1], device=cos.device)
            self._arguments = rows, self._layout.table(cos, sin), self._layout.interleaved
            self._cos = cos
        return self._arguments


class FusedAttention:
    """The forward of a `UsualAttention`."""

    def __init__(
        self,
        usual: UsualAttention,
        attend: AttentionCall,
        tables: RotaryTables | None,
        qkv: Stacked,
        out: Stacked,
        heads: RecordedAttention,
    ) -> None:
        self.recorded, self.attend = heads, attend
        self._module, self._tables = usual.module, tables
        self._qkv, self._out = qkv, out
        self._split = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]  # of this process
        self._shape = (sum(self._split), heads.head_size)
        self._eps = usual.eps

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Return the output [1, T, hidden] for hidden states [1, T, hidden], as transformers calls it."""
        module = self._module
        qkv = self._qkv(hidden_states[0])
        q, k, v = qkv.view(-1, *self._shape).split_with_sizes(self._split, dim=1)
        rotation: tuple[Any, ...] = ()
        if self._tables is not None and position_embeddings is not None:
            rotation = self._tables.arguments(*position_embeddings)
            if self._eps is not None:
                rotation = (module.q_norm.weight, module.k_norm.weight, self._eps, *rotation)
        return self._out(self.attend(q, k, v, *rotation).flatten(1)).unsqueeze(0), None

    def add_up(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the outputs of all processes."""
        self._out = Summed(self._out, all_reduce)
