"""The contract of model families: a descriptor without tensors, and a module that computes.

The core knows a family only by its `architectures` name. `describe` reads `config.json` alone, so that memory and cache
groups are planned without a tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tokenspeed_core.targets import load_target

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tokenspeed_core.api.cache_groups import CacheGroupSpec
    from tokenspeed_core.api.experts import ExpertBalance
    from tokenspeed_core.api.parallel import Collective, FusedCollective, ProcessGroup, TokenCounts
    from tokenspeed_core.api.quantization import QuantizationScheme


ANY_ARCHITECTURE = "*"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a checkpoint that the core needs.

    `num_parameters` counts all weights (tied ones once); `cache_groups` are the caches of each sequence. If it
    `is_bidirectional`, tokens of a prompt attend to later ones in some layers. A prompt is then computed in one step,
    and shares no cache entries.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    num_layers: int
    num_parameters: int
    cache_groups: tuple[CacheGroupSpec, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    is_bidirectional: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model family: an entry point of `tokenspeed.models` with the name in `architectures`.

    `describe` is "module:function", taking config.json as a dict and returning ModelInfo; it imports no
    tensor library and raises ValueError, naming the key, for a configuration that it does not support. `load` is
    "module:class", a `Model` built by `cls(config, build)`.

    The family named `ANY_ARCHITECTURE` is used for architectures that no other installed family supports. If it
    `runs_remote_code`, `--trust-remote-code` puts the checkpoint's folder into `config`, under the key
    "trust_remote_code"; all other families refuse that flag.

    `mtp` is "module:function", for a family with layers for multi-token prediction in some checkpoints. It takes
    config.json and the checkpoint's folder and returns their `DraftModelInfo`, or raises ValueError if there are none.
    """

    architecture: str
    describe: str
    load: str
    runs_remote_code: bool = False
    mtp: str | None = None

    def make(self, config: Mapping[str, Any], build: BuildContext) -> Model:
        """Build a model. Errors of its constructor propagate."""
        model: Model = load_target(self.load)(config, build)
        return model

    def plan_mtp(self, config: Mapping[str, Any], path: Path) -> DraftModelInfo:
        """Return a checkpoint's layers for multi-token prediction. Raises ValueError if it has none."""
        if self.mtp is None:
            raise ValueError(f"{self.architecture} has no layers for multi-token prediction")
        info: DraftModelInfo = load_target(self.mtp)(config, path)
        return info


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in a package: an entry point of `tokenspeed.checkpoints`, a name for a path."""

    name: str
    path: str
    description: str


@dataclass(frozen=True, slots=True)
class LoadFormat:
    """A weight file format: an entry point of `tokenspeed.load_formats` with the name for `--load-format`.

    `load` is "module:function" with the signature of `WeightReader`. `detect` are glob patterns of its weight files;
    `--load-format auto` chooses the format if one matches. Formats without a pattern must be named, and so must formats
    with files that can contain code (`by_name_only`). `kv_scales` is "module:function"; it returns the scales of an FP8
    KV cache in a checkpoint directory, a `Mapping[int, KVScale]` by layer, and imports no tensor library.
    """

    name: str
    load: str
    detect: tuple[str, ...]
    by_name_only: bool = False
    kv_scales: str | None = None


@dataclass(frozen=True, slots=True)
class KVScale:
    """The per-tensor scales of a layer's FP8 KV cache, which stores keys and values divided by them.

    A latent cache (MLA) uses the scale of the keys.
    """

    key: float = 1.0
    value: float = 1.0


class WeightReader(Protocol):
    """Yields the (name, tensor) pairs of a checkpoint directory, one at a time, on the CPU."""

    def __call__(
        self,
        path: str,
        model: Model | DraftModel | BlockDraftModel,
        report: Callable[[int, int], None],
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield weights; call `report(bytes_done, bytes_total)` while reading."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The op that rotates a layer's queries and keys, such as "rope", and the number of rotated elements per head."""

    op: str
    rotary_size: int


class AttentionCall(Protocol):
    """A layer's attention, bound to its KV cache: it rotates q and k if requested, writes k and v, then attends."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rotation: Any
    ) -> torch.Tensor:
        """Attend. q [T, H, D]; k, v [T, K, D]; returns [T, H, D], valid until the next call.

        `rotation` are the arguments of the rotation's op after q and k. q and k may be overwritten.
        """

    def write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rotation: Any) -> None:
        """Rotate q and k, and write k and v, as a call does. Nothing attends."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The shape of a layer's multi-head latent attention (MLA, arXiv:2405.04434). Sizes are values.

    A token's cache entry is a latent and a rotated key part. A head's key is an expansion of the latent, then that part.
    """

    num_heads: int  # H
    latent_size: int  # L
    rope_size: int  # R, the rotated values of a query and of a key
    nope_size: int  # N, the values of a query and of a key that are not rotated
    value_size: int  # V


class LatentAttentionCall(Protocol):
    """A layer's latent attention, bound to its cache: it rotates, writes the cache entries, then attends."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
        kv_up: torch.Tensor,
    ) -> torch.Tensor:
        """Attend. q is [T, H, N + R]; its last R values are rotated in place. Returns [T, H, V].

        kv [T, L + R] is the latent before its RMS norm (norm_weight [L], eps), then the key part before its rotation.
        positions, cos_sin and interleaved are as in the op `rope`. kv_up [H, N + V, L] expands a latent to each head's
        key and value. The call may keep kv_up: it must be the same parameter in each step.
        """


class BuildContext(Protocol):
    """The context of a model's constructor: its device and dtype, its quantization, and access to kernels.

    `max_model_len` is the engine's longest sequence, in tokens. With an `expert_balance`, layers let the engine move
    their experts. If it `routes_tokens`, engines that share experts send each token only to the engines of its experts
    (`exchange_tokens`). Otherwise every process gets all tokens, and `token_counts` says which are padding.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    expert_balance: ExpertBalance | None
    routes_tokens: bool
    token_counts: TokenCounts

    def group(self, name: str) -> ProcessGroup:
        """Return one of the process groups that share the model. Raises ValueError for an unknown name."""

    def scheme(self, layer: str) -> QuantizationScheme | None:
        """Return how a linear layer is quantized, None if it is not.

        `layer` is its name in the checkpoint, such as "model.layers.0.self_attn.q_proj".
        """

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layers from 0, so that the kernel plan knows which layer asks for an op."""

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op for a problem (see the op's contract for both)."""

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return the selected kernel of a fused op, or None if its parts must be used instead.

        It is None if no kernel fits or if the user chose a backend for one of the contract's `parts`.
        """

    def comm(self, collective: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the kernel of a collective, and add it to the plan of collectives."""

    def fused_comm(self, all_reduce: Collective) -> FusedCollective | None:
        """Return the kernels of an all-reduce that is added to the residual and normalized, and add it to the plan.

        If no kernel of its `fused_op` fits, use FUSED_OP, which does not quantize. If all-reduces run alone, return None;
        `comm` then returns the kernel.
        """

    def side_stream(self) -> torch.cuda.Stream | None:
        """Return a stream for work in parallel to the current one. All modules share it. None without CUDA."""

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
        sinks: torch.Tensor | None = None,
        value_head_size: int | None = None,
        is_bidirectional: bool = False,
        group: str = "full",
        rotation: Rotation | None = None,
    ) -> AttentionCall:
        """Register a layer's attention in a cache group of the model's `ModelInfo` and return its call.

        With `is_chunked`, the window is the length of chunks (see `AttentionProblem`), and the group a `SlidingWindow`.
        The window, heads, head sizes and number of layers must match the group. Values have `value_head_size` elements
        per head (None: `head_size`). `sinks` (float32 [H]) is a parameter; attention reads its memory in each step.
        With a `rotation`, one kernel may rotate and write the cache; without, q and k are used unchanged. A layer that
        `is_bidirectional` shows each token of a prompt the later ones; the model's `ModelInfo` must say so too.
        """

    def latent_attention(
        self, *, layer: int, sizes: LatentSizes, scale: float, group: str = "latent"
    ) -> LatentAttentionCall:
        """Register a layer's latent attention in a cache group of the model's `ModelInfo` and return its call.

        `scale` is the factor of the scores. The sizes and the number of layers must match the group.
        """


class Model(Protocol):
    """A family's module. It contains no collectives, reads no environment variables, and never sees a request."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        """Allocate parameters on `build.device` (uninitialized) and bind kernels."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's weights. Raises ValueError naming every missing, unexpected or misshapen one."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """Return hidden states [R, hidden] of `wanted`, int64 [R] among the T tokens (None: all, in their order).

        token_ids and positions are int64 [T] on the device. It may skip work for rows outside `wanted`, such as the last
        layer's MLP: only the last row of a long prompt is wanted.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab] (in the model's dtype or float32) for rows of hidden states [R, hidden]."""


@runtime_checkable
class CapturingModel(Protocol):
    """A `Model` that lets a draft model read its residual stream."""

    def forward_and_capture(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states [T, hidden] of all tokens, and the residual stream before some layers.

        The latter is concatenated, [T, len(layers) * hidden].
        """


class HiddenStates(StrEnum):
    """The target's hidden states that a draft model reads."""

    NONE = "none"  # it reads tokens only
    LAST = "last"  # the result of the target's `forward`, [T, H]
    LAYERS = "layers"  # the residual stream before `DraftModelInfo.layers`, concatenated, [T, layers * H]


@dataclass(frozen=True, slots=True)
class DraftModelInfo:
    """A draft model (`DraftModel`) and its needs.

    The core adds the layers of `cache_groups` to the target's groups of equal parts and window, and keeps the other
    groups next to them. The numbers of layers and parameters are those that the model adds to the target's. A model with
    a `mask_token_id` is a `BlockDraftModel`, and makes at most `max_drafts` tokens after a step (None: any number).
    """

    load: str  # "module:class", called with `config`, a build context and the target model
    config: Mapping[str, Any]
    cache_groups: tuple[CacheGroupSpec, ...]
    num_layers: int
    num_parameters: int
    weights: Path  # folder, read with the format of `--speculative-draft-load-format`, if it is not the target's
    hidden: HiddenStates
    layers: tuple[int, ...] = ()  # for HiddenStates.LAYERS
    mask_token_id: int | None = None
    max_drafts: int | None = None


class DraftModel(Protocol):
    """A model that drafts tokens after each step of a target model.

    It computes its cache entries for the positions that the target computes, in the same step. A model that reads
    hidden states gets, for the hidden state of a position, the token that follows it; for the newest position of a
    sequence that is the token that was just chosen. Otherwise it gets the token of the position itself.
    """

    def __init__(self, config: Mapping[str, Any], build: BuildContext, target: Model) -> None:
        """Allocate parameters, or share the target's parameters, and bind kernels. Layers are counted from 0."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of its folder; names of other models are ignored. Raises ValueError as `Model` does."""

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the target's hidden states [T, W] to those that `forward` takes, [T, H].

        It is not called for a model that reads tokens only.
        """

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden states [R, H] of `wanted`, int64 [R] among the T tokens (None: all), and write the cache.

        token_ids and positions are int64 [T], hidden is [T, H] (None if it reads tokens only). The next pass takes the
        result as its hidden states.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of the target's vocabulary for rows [R, H] of `forward`."""


class BlockDraftModel(Protocol):
    """A model that drafts a block of tokens in one pass after each step of a target model.

    Its cache entries of a position that the target computes follow from the target's hidden states there, which
    `DraftModelInfo.hidden` names. A block is the last token of a sequence, and mask tokens in place of the draft tokens.
    Each token of a block attends to all entries before the block and to the whole block.
    """

    def __init__(self, config: Mapping[str, Any], build: BuildContext, target: Model) -> None:
        """Allocate parameters, or share those of the target, and bind kernels. Layers are counted from 0."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of its folder; names of other models are ignored. Raises ValueError as `Model` does."""

    def write_context(self, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the cache entries of positions int64 [T], from the target's hidden states [T, W]."""

    def forward_block(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return hidden states [T, H] of the tokens of blocks, int64 [T], and write their cache entries.

        The step that attention is prepared for has one row for each token, and as many rows as tokens.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of the target's vocabulary for rows [R, H] of `forward_block`."""
