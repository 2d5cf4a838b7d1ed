"""The build context of a model's constructor, and the selection of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from tokenspeed_core.api.attention import AttentionLimits, AttentionProblem
from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    CachePart,
    keys_and_values,
    local_cache_group,
)
from tokenspeed_core.api.experts import ExpertBalance
from tokenspeed_core.api.kernels import PHASES, PlatformInfo
from tokenspeed_core.api.models import HiddenStates, KVScale, LatentSizes, Rotation
from tokenspeed_core.api.ops import Problem
from tokenspeed_core.api.parallel import (
    FUSED_OP,
    Collective,
    CommGroup,
    FusedCollective,
    ProcessGroup,
    TokenCounts,
)
from tokenspeed_core.api.quantization import QuantizationScheme
from tokenspeed_core.config.parallel_settings import LOCAL
from tokenspeed_core.engine.backends import EXCHANGE_OP
from tokenspeed_core.errors import CheckpointError, PluginError, TokenSpeedError
from tokenspeed_core.executor.expert_placement import NUM_TURNS
from tokenspeed_core.kernels.error_attribution import describe_kernel
from tokenspeed_core.kernels.plan import PlannedOp
from tokenspeed_core.kernels.select import Choice, Selector
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.attention import (
    UNSCALED,
    AttentionGroup,
    AttentionLayer,
    CachedLayer,
    make_write_kv,
)
from tokenspeed_core.worker.distributed import on_abort
from tokenspeed_core.worker.latent import FIND_SHARED, OPS, LatentKernels, LatentLayer
from tokenspeed_core.worker.platform import have_peer_access

# Maximum bytes of activations for a fused all-reduce among more than two processes. It sends all partial sums to all
# processes; if they are large, it is faster to send each part once or twice. Between two processes, both send the same.
_MAX_FUSED_BYTES = 512 << 10


class ModelBuild:
    """The `BuildContext` of a model's constructor, and afterwards a record of its requests.

    Kernels other than attention are loaded on request. Attention waits until all layers are known, since the block
    size is decided for all of them together.
    """

    def __init__(
        self,
        resolved: Resolved,
        device: torch.device,
        selector: Selector,
        handles: Mapping[str, Any] | None = None,
    ) -> None:
        """Start without layers. On the meta device, kernels are planned and not loaded.

        `handles` are the torch.distributed handles of the groups with several processes, by name.
        """
        self.dtype: torch.dtype = getattr(torch, resolved.config.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, resolved.kv_dtype)
        self._dtypes = {"dtype": resolved.config.dtype, "kv_dtype": resolved.kv_dtype}
        self.device = device
        self.max_model_len = resolved.limits.max_model_len
        self.routes_tokens = any(each.target == EXCHANGE_OP for each in resolved.overrides)
        self.expert_balance = (
            ExpertBalance(resolved.config.num_redundant_experts, NUM_TURNS)
            if resolved.config.enable_eplb
            else None
        )
        self.schemes: dict[str, QuantizationScheme | None] = {}
        self._quantization = resolved.quantization
        self._parallel, self._handles = resolved.parallel, handles or {}
        self.token_counts = TokenCounts(resolved.parallel.group("data").size)
        self.selector = selector
        self.layers: list[AttentionLayer] = []
        self.latent_layers: list[LatentLayer] = []
        info = resolved.checkpoint.info
        self._owner, self._declaration = info.architecture, "`describe`"  # for messages
        self._is_bidirectional = info.is_bidirectional
        processes = resolved.parallel.group("attn")
        self._group_specs = {
            group.name: local_cache_group(group, processes) for group in resolved.cache_groups
        }
        self.groups = {name: AttentionGroup(spec) for name, spec in self._group_specs.items()}
        self._kv_scales = resolved.kv_scales
        self._max_expanded = resolved.config.mla_chunk_multiplier * resolved.limits.max_num_tokens
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sizes = resolved.config.parallel_sizes()
        self._fusion = resolved.config.enable_allreduce_fusion
        if self._fusion is None and resolved.parallel.world_size > 1:
            selector.not_fused = _why_not_fused(resolved, selector.platform)
            self._fusion = False if selector.not_fused else None
        self._max_fused_tokens = resolved.config.comm_fusion_max_num_tokens
        self._max_num_tokens = resolved.limits.max_num_tokens
        self._layer: int | None = None
        self._is_draft, self._first_layer = False, 0
        self._group_names: Mapping[str, str] = {}
        self._kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._bound: list[tuple[Any, Choice]] = []

    def for_draft_model(
        self, name: str, first_layer: int, group_names: Mapping[str, str], *, is_quantized: bool
    ) -> ModelBuild:
        """Return the context of a draft model. Its layers are numbered after those of the target model.

        Errors name the drafter: `name`.
        `group_names` maps the draft model's cache groups to those of the engine. The target's quantization applies if
        `is_quantized`. The requests of the draft model are recorded here too.
        """
        context = copy(self)
        context._owner, context._declaration = name, "`DraftModelInfo`"
        context._is_draft = True
        context._first_layer, context._group_names = first_layer, group_names
        context.expert_balance = None  # few experts: only those of the target move
        if not is_quantized:
            context._quantization, context.schemes = None, {}
        return context

    @property
    def local_groups(self) -> tuple[CacheGroupSpec, ...]:
        """The cache groups with the KV heads that this process keeps."""
        return tuple(self._group_specs.values())

    @property
    def cached_layers(self) -> list[CachedLayer]:
        """The layers that keep a part of the KV cache."""
        return [*self.layers, *self.latent_layers]

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layers from 0, so that the kernel plan knows which layer asks for an op."""
        for layer in range(num_layers):
            self._layer = self._first_layer + layer
            yield layer
        self._layer = None

    def group(self, name: str) -> ProcessGroup:
        """Return one of the process groups that share the model. Raises ValueError for an unknown name."""
        return self._parallel.group(name)

    def scheme(self, layer: str) -> QuantizationScheme | None:
        """Return how a linear layer is quantized, None if it is not; `schemes` records the answer."""
        found = None if self._quantization is None else self._quantization.scheme_of(layer)
        self.schemes[layer] = found
        return found

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op; equal problems of one kernel share one object."""
        return self._load(self.selector.select(op, problem, layer=self._layer))

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return the selected kernel of a fused op, or None if its parts run instead."""
        choice = self.selector.select_fused(op, problem, layer=self._layer)
        return None if choice is None else self._load(choice)

    def comm(self, collective: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the selected kernel of a collective."""
        group = self.group(collective.group)
        choice = self.selector.select_collective(
            collective, group.size, self._num_nodes(group), is_draft=self._is_draft
        )
        handle = self._handles.get(group.name)
        return self._load(choice, CommGroup(group, handle, self.token_counts, on_abort))

    def fused_comm(self, all_reduce: Collective) -> FusedCollective | None:
        """Return the kernels of an all-reduce that may be fused; None if it runs alone."""
        if self._fusion is False:
            return None
        group = self.group(all_reduce.group)
        limit = self._max_num_tokens
        if self._max_fused_tokens is not None:
            limit = min(limit, self._max_fused_tokens)
        elif group.size > 2:
            num_bytes = all_reduce.size * getattr(torch, all_reduce.dtype).itemsize
            limit = min(limit, max(1, _MAX_FUSED_BYTES // num_bytes))
        all_reduce = replace(all_reduce, max_fused_tokens=limit)
        choice = self.selector.select_fused_collective(
            all_reduce,
            group.size,
            self._num_nodes(group),
            is_required=self._fusion is True,
        )
        if choice is None:
            return None
        comm_group = CommGroup(group, self._handles.get(group.name), self.token_counts, on_abort)
        kernel = self._load(choice, comm_group)
        all_reduce = replace(all_reduce, fused_op=choice.spec.op)
        quantizes = choice.spec.op != FUSED_OP
        return FusedCollective(kernel, self.comm(all_reduce), limit, quantizes)

    def side_stream(self) -> torch.cuda.Stream | None:
        """Return a stream for work in parallel to the current one; None without CUDA."""
        return self._side

    def _num_nodes(self, group: ProcessGroup) -> int:
        """Return the number of machines that run the processes of a group."""
        if self._sizes.num_nodes == 1:
            return 1
        return len({rank // self._sizes.num_per_node for rank in group.ranks})

    def _load(self, choice: Choice, *group: CommGroup) -> Callable[..., Any]:
        # Groups of the same processes share kernels, and their memory.
        ranks = [each.group.ranks for each in group]
        key = (choice.spec, tuple(sorted(choice.problem.items())), *ranks)
        if key not in self._kernels:
            is_plan = self.device.type == "meta"
            self._kernels[key] = (
                _not_loaded if is_plan else self._make(choice, choice.problem, *group)
            )
        return self._kernels[key]

    def _make(self, choice: Choice, *arguments: Any) -> Any:
        """Call a kernel's factory. Raises PluginError, which names the kernel, for any exception in it."""
        try:
            kernel = choice.spec.factory(choice.options)(*arguments)
        except (TokenSpeedError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:  # plugin code may raise anything
            what = f"{choice.spec.load} raised {type(error).__name__}: {error}"
            kernel = describe_kernel(self.selector.planned(choice))
            raise PluginError(f"{what}. Raised in {kernel}") from error
        self._bound.append((kernel, choice))
        return kernel

    def bound_kernels(self) -> list[tuple[Any, PlannedOp]]:
        """Return the kernels in use, each with its decision."""
        return [(kernel, self.selector.planned(choice)) for kernel, choice in self._bound]

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
    ) -> AttentionLayer:
        """Register a layer's attention.

        Raises CheckpointError if the layer does not match what the family's `describe` declared.
        """
        layer, group = self._first_layer + layer, self._group_names.get(group, group)
        if is_bidirectional and not self._is_bidirectional:
            raise CheckpointError(
                f"{self._owner} layer {layer} is bidirectional, but the model is described as causal. Set "
                "ModelInfo.is_bidirectional in `describe`. A bidirectional drafter needs a bidirectional model."
            )
        if is_bidirectional and is_chunked:
            raise CheckpointError(
                f"{self._owner} layer {layer} is both chunked and bidirectional, which no kernel supports."
            )
        parts = keys_and_values(num_kv_heads, head_size, value_head_size)
        index = self._next_index(layer, group, parts, window)
        problem = partial(
            _attention_problem,
            is_bidirectional=is_bidirectional,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
            is_chunked=is_chunked,
            value_head_size=None if value_head_size == head_size else value_head_size,
            dtype=self._dtypes["dtype"],
            kv_dtype=self._dtypes["kv_dtype"],
        )
        kv_scale = self._kv_scale(layer)
        call = AttentionLayer(self.groups[group], index, layer, problem, rotation, kv_scale, sinks)
        self.layers.append(call)
        return call

    def latent_attention(
        self, *, layer: int, sizes: LatentSizes, scale: float, group: str = "latent"
    ) -> LatentLayer:
        """Register a layer's latent attention. Raises CheckpointError as `attention` does."""
        layer, group = self._first_layer + layer, self._group_names.get(group, group)
        if self._is_bidirectional:
            raise CheckpointError(
                f"{self._owner} layer {layer}: latent attention cannot be bidirectional. Its kernels are causal."
            )
        width = sizes.latent_size + sizes.rope_size
        index = self._next_index(layer, group, (CachePart("latent", (width,)),))
        kv_scale = self._kv_scale(layer).key
        call = LatentLayer(
            self.groups[group], index, layer, sizes, scale, self._max_expanded, kv_scale
        )
        self.latent_layers.append(call)
        return call

    def _kv_scale(self, layer: int) -> KVScale:
        """Return the scales of a layer's cache. Checkpoints have none for layers of draft models."""
        return self._kv_scales[layer] if layer < len(self._kv_scales) else UNSCALED

    def _num_layers(self, group: str) -> int:
        """Return the number of layers that use a cache group so far."""
        return sum(each.group is self.groups[group] for each in self.cached_layers)

    def _next_index(
        self, layer: int, group: str, parts: tuple[CachePart, ...], window: int | None = None
    ) -> int:
        """Return the index of a new layer in its cache group. Raises CheckpointError unless the layer matches it."""
        if group not in self.groups:
            raise CheckpointError(
                f"{self._owner} layer {layer}: unknown cache group {group!r}; {self._declaration} declares "
                f"{', '.join(self.groups) or 'none'}"
            )
        spec, index = self._group_specs[group], self._num_layers(group)
        if index >= spec.num_layers:
            raise self._mismatch(layer, group, f"{index + 1} or more layers", spec.num_layers)
        if parts != spec.parts:
            raise self._mismatch(layer, group, _describe_parts(parts), _describe_parts(spec.parts))
        if spec.window is not None and (window is None or window > spec.window):
            raise self._mismatch(layer, group, f"window {window}", f"{spec.window} tokens")
        return index

    def _mismatch(self, layer: int, group: str, wanted: str, kept: object) -> CheckpointError:
        return CheckpointError(
            f"{self._owner} layer {layer} does not match its cache group {group!r}: "
            f"the layer has {wanted}, the group keeps {kept}. Correct {self._declaration} or the model class."
        )

    def check_groups(self, num_later: Mapping[str, int]) -> None:
        """Raise CheckpointError if a cache group has memory for more layers than use it.

        `num_later` are the layers that will be added to a group.
        """
        for name, spec in self._group_specs.items():
            num_layers = self._num_layers(name)
            num_declared = spec.num_layers - num_later.get(name, 0)
            if num_layers != num_declared:
                raise CheckpointError(
                    f"{self._owner}: cache group {name!r} declares {num_declared} layers, but "
                    f"{num_layers} use it. Correct {self._declaration} or the model class."
                )

    def select_attention(self, block_size: int) -> None:
        """Choose the backends of all layers, and the kernels that rotate and write their caches, for a block size.

        Raises SelectionError.
        """
        for layer in self.layers:
            for phase in PHASES:
                problem = layer.problem(phase=phase, block_size=block_size)
                layer.choices[phase] = self.selector.select_attention(problem, layer=layer.layer)
            layer.write_kv = self._write_kv(layer, asdict(problem))
        for latent in self.latent_layers:
            choices = self.select_latent(self.selector, latent, block_size)
            latent.kernels = LatentKernels(*(self._load(choice) for choice in choices))

    def select_latent(
        self, selector: Selector, layer: LatentLayer, block_size: int
    ) -> list[Choice]:
        """Choose the kernels of a layer's latent attention, in the order of `LatentKernels`. Raises SelectionError."""
        axes = {**asdict(layer.sizes), **self._dtypes, "block_size": block_size}
        choices = [
            choice
            for op, phase in OPS
            for choice in selector.select_all((op,), {**axes, "phase": phase}, layer=layer.layer)
        ]
        if any("shared_prefix" in each.spec.capability.features for each in choices):
            choices += selector.select_all((FIND_SHARED,), axes, layer=layer.layer)
        return choices

    def _write_kv(self, layer: AttentionLayer, axes: Problem) -> Callable[..., None]:
        """Return the function that rotates and writes the cache.

        It is one fused kernel if one fits, there is no scale, and values have as many elements as keys.
        """
        ops: tuple[str, ...] = ("write_kv",)
        if layer.rotation is not None:
            ops, axes = (
                (layer.rotation.op, *ops),
                {**axes, "rotary_size": layer.rotation.rotary_size},
            )
        may_fuse = layer.kv_scale == UNSCALED and axes["value_head_size"] is None
        chains = (ops,) if may_fuse else tuple((op,) for op in ops)
        choices = [
            each
            for chain in chains
            for each in self.selector.select_all(chain, axes, layer=layer.layer)
        ]
        *before, write = (self._load(choice) for choice in choices)
        if len(choices) < len(ops):
            return write
        return make_write_kv(before[0] if before else None, write, layer.kv_scale)

    def bind_attention(self, limits: AttentionLimits) -> None:
        """Build the chosen backends, one per cache group and distinct problem of a kernel."""
        for group in self.groups.values() if self.device.type == "cuda" else ():
            group.side, group.is_split = torch.cuda.Stream(self.device), True  # type: ignore[no-untyped-call]
        for layer in self.layers:
            kernels = layer.group.kernels
            for phase, choice in layer.choices.items():
                problem = AttentionProblem(**choice.problem)
                key = (choice.spec, problem)
                if key not in kernels:
                    kernels[key] = self._make(choice, problem, limits, self.device)
                layer.bind(phase, kernels[key])
                layer.group.is_split |= choice.spec != layer.choices[PHASES[0]].spec


def _attention_problem(phase: str, *, is_bidirectional: bool, **others: Any) -> AttentionProblem:
    """Return a layer's problem in a phase. Decodes are causal, so any backend may serve them."""
    return AttentionProblem(
        phase, is_bidirectional=is_bidirectional and phase == "prefill", **others
    )


def _why_not_fused(resolved: Resolved, platform: PlatformInfo) -> str:
    """Return why all-reduces are not fused by default, "" if they may be.

    Between two GPUs that can address each other's memory, fused ones were measured to be faster.
    """
    config, draft_model = resolved.config, resolved.draft_model
    sizes = config.parallel_sizes()
    is_local = sizes.num_nodes == 1 and config.distributed_executor_backend == LOCAL
    if platform.kind != "cuda" or sizes.num_per_node != 2 or not is_local:
        return "by default, all-reduces are fused only between two GPUs of the same machine"
    if draft_model is not None and draft_model.hidden == HiddenStates.LAYERS:
        return "the drafter reads the residual stream of layers"
    if not have_peer_access(sizes.num_per_node):
        return "the GPUs cannot address each other's memory"
    return ""


def _describe_parts(parts: tuple[CachePart, ...]) -> str:
    return ", ".join(f"{part.name} {list(part.shape)}" for part in parts)


def _not_loaded(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("a model on the meta device cannot compute")
