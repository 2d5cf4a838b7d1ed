"""Builds the model of a configuration and selects its kernels, on a device or as a plan only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenspeed_core.api.attention import AttentionLimits
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.api.logits_processors import LogitsProcessor, LogitsProcessorContext
from tokenspeed_core.api.models import (
    BlockDraftModel,
    CapturingModel,
    DraftModel,
    HiddenStates,
    Model,
)
from tokenspeed_core.api.parallel import ProcessGroup
from tokenspeed_core.config import Config
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.errors import CheckpointError, ConfigError, TokenSpeedError
from tokenspeed_core.kernels.installed import (
    how_to_get_kernels,
    installed_kernels,
    installed_ops,
    installed_rankings,
)
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.targets import load_target
from tokenspeed_core.worker.block_size import solve_block_size
from tokenspeed_core.worker.build import ModelBuild
from tokenspeed_core.worker.logits_processors import load_processors
from tokenspeed_core.worker.memory import PoolLimits
from tokenspeed_core.worker.platform import describe_device, resolve_device
from tokenspeed_core.worker.sampler import RunnerKernels
from tokenspeed_core.worker.slots import max_num_blocks


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """A model without weights, its kernels and its memory layout."""

    resolved: Resolved
    model: Model
    draft_model: DraftModel | BlockDraftModel | None
    build: ModelBuild
    selector: Selector
    block_size: int
    pool: PoolLimits
    kernels: RunnerKernels
    processors: Mapping[str, LogitsProcessor]

    @property
    def limits(self) -> AttentionLimits:
        """The largest step for an attention backend, with the padding of captured steps and the blocks of drafters."""
        limits, draft = self.resolved.limits, self.resolved.draft_model
        num_rows, num_tokens = limits.max_num_seqs + 1, limits.max_num_tokens
        if draft is not None and draft.mask_token_id is not None:  # each token of a block is a row
            num_rows *= 1 + limits.max_drafts
            num_tokens = max(num_tokens, num_rows)
        return AttentionLimits(
            max_num_rows=num_rows,
            max_num_tokens=num_tokens + limits.max_num_seqs + 1,
            max_model_len=limits.max_model_len,
            max_num_blocks=max_num_blocks(limits.max_model_len, self.block_size),
            max_drafts=limits.max_drafts,
        )


def plan_for(resolved: Resolved, catalog: Catalog, platform: PlatformInfo | None) -> KernelPlan:
    """Return the kernels for a platform, None for the device of the configuration. Raises as `assemble` does."""
    device = (
        resolve_device(resolved.config.device) if platform is None else torch.device(platform.kind)
    )
    return assemble(resolved, catalog, device, only_plan=True, platform=platform).selector.plan()


def assemble(
    resolved: Resolved,
    catalog: Catalog,
    device: torch.device,
    *,
    only_plan: bool = False,
    platform: PlatformInfo | None = None,
    handles: Mapping[str, Any] | None = None,
) -> Assembly:
    """Select kernels for `device` and construct the model there (on the meta device with `only_plan`).

    A plan may be for another `platform` of the device's kind. `handles` are the torch.distributed handles of the groups
    with several processes, by name. Raises CheckpointError for a configuration that the family does not support, and
    SelectionError if an op has no kernel.
    """
    config, checkpoint = resolved.config, resolved.checkpoint
    kernels = installed_kernels(catalog, resolved.overrides)
    needs = frozenset({"graph_safe"} if device.type == "cuda" and not config.enforce_eager else ())
    selector = partial(
        Selector,
        kernels,
        platform or describe_device(device),
        resolved.overrides,
        options=config.backend_options,
        rankings=installed_rankings(catalog),
        ops=installed_ops(catalog),
        needs=needs,
        hint=how_to_get_kernels(catalog),
        first_draft_layer=checkpoint.info.num_layers,
    )
    chosen = selector()
    where = torch.device("meta") if only_plan else device
    try:
        build = ModelBuild(resolved, where, chosen, handles)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    entry, load = catalog.get("models", checkpoint.spec.architecture), checkpoint.spec.load
    model: Model = _construct(entry, load, checkpoint.path, checkpoint.config, build)
    build.check_groups(resolved.num_draft_layers)
    draft = _draft_model(resolved, build, model)
    method = resolved.quantization
    if method is not None and not any(build.schemes.values()):
        raise CheckpointError(
            f"--quantization {method.name} has no effect: {checkpoint.info.architecture} has no linear layer that it "
            "quantizes."
        )
    _check_parallel_flags(
        config, checkpoint.info.architecture, chosen.plan(), resolved.parallel.group("engine")
    )
    if config.mla_chunk_multiplier != 1 and not build.latent_layers:
        raise ConfigError(
            f"--mla-chunk-multiplier has no effect: {checkpoint.info.architecture} has no latent attention (MLA). "
            "Remove it."
        )
    block_size = solve_block_size(build, config.block_size, selector)
    build.select_attention(block_size)
    assembly = Assembly(
        resolved,
        model,
        draft,
        build,
        chosen,
        block_size,
        PoolLimits.of(
            build.local_groups,
            block_size,
            build.kv_dtype.itemsize,
            resolved.limits.max_model_len,
            resolved.limits.max_chunk,
        ),
        _runner_kernels(build, resolved, block_size),
        {} if only_plan else _processors(resolved, catalog, device),
    )
    chosen.check()
    return assembly


def _check_parallel_flags(
    config: Config, architecture: str, plan: KernelPlan, engine: ProcessGroup
) -> None:
    """Raise ConfigError for flags of processes and of fused all-reduces that have no effect on the model."""
    of_experts = {
        "--enable-expert-parallel": config.enable_expert_parallel,
        "--expert-parallel-size": config.expert_parallel_size is not None,
        "--moe-tp-size": config.moe_tp_size is not None,
    }
    given = [flag for flag, is_given in of_experts.items() if is_given]
    if given and not plan.find("moe"):
        raise ConfigError(
            f"{given[0]} has no effect: {architecture} has no experts. Remove it, or share the model with "
            "--tensor-parallel-size."
        )
    groups = {each.collective.group for each in plan.collectives}
    if config.dense_tp_size not in (None, 1) and "dense" not in groups:
        raise ConfigError(
            f"--dense-tp-size has no effect: {architecture} has no dense MLPs. Remove it."
        )
    if max((each.num_processes for each in plan.collectives), default=1) < engine.size:
        raise ConfigError(
            f"no layer of {architecture} is divided among all {engine}. Use fewer processes, or change these flags."
        )
    of_fusion = {
        "--enable-allreduce-fusion": config.enable_allreduce_fusion,
        "--comm-fusion-max-num-tokens": config.comm_fusion_max_num_tokens,
    }
    given = [flag for flag, value in of_fusion.items() if value]
    if given and not any(each.collective.max_fused_tokens for each in plan.collectives):
        why = f"{architecture} has no all-reduce before a norm that could join it"
        raise ConfigError(f"{given[0]} has no effect: {plan.not_fused or why}. Remove it.")


def _draft_model(
    resolved: Resolved, build: ModelBuild, target: Model
) -> DraftModel | BlockDraftModel | None:
    """Build the draft model, if the drafter is one. Raises CheckpointError if it does not fit the target."""
    choice, info = resolved.drafter, resolved.draft_model
    if choice is None or info is None:
        return None
    if info.hidden == HiddenStates.LAYERS and not isinstance(target, CapturingModel):
        raise CheckpointError(
            f"{choice.entry} reads hidden states of layers, which {resolved.checkpoint.info.architecture} does not "
            "return. Choose another drafter."
        )
    if info.hidden == HiddenStates.LAYERS and resolved.config.enable_allreduce_fusion:
        raise ConfigError(
            f"--enable-allreduce-fusion does not support {choice.entry}, which reads the residual stream of layers; "
            "remove one of them."
        )
    context = build.for_draft_model(
        str(choice.entry),
        resolved.checkpoint.info.num_layers,
        resolved.draft_groups,
        is_quantized=info.weights == resolved.checkpoint.path and not choice.is_unquantized,
    )
    draft: DraftModel | BlockDraftModel = _construct(
        choice.entry, info.load, info.weights, info.config, context, target
    )
    context.check_groups({})
    return draft


def _construct(entry: Entry, target: str, weights: Path, *arguments: Any) -> Any:
    """Construct the module of a family. Raises CheckpointError, with the folder of the weights, if it raises ValueError."""
    passes = (ValueError, TokenSpeedError, torch.OutOfMemoryError)
    try:
        return make(entry, target, lambda: load_target(target)(*arguments), object, passes)
    except ValueError as error:
        raise CheckpointError(f"{weights}: {error}") from error


def _processors(
    resolved: Resolved, catalog: Catalog, device: torch.device
) -> dict[str, LogitsProcessor]:
    """Return the logits processors that requests may name. Raises PluginError."""
    limits = resolved.limits
    context = LogitsProcessorContext(limits.vocab_size, limits.max_num_seqs + 1, str(device))
    return load_processors(LogitsProcessorTable.of(resolved.config, catalog), catalog, context)


def _runner_kernels(build: ModelBuild, resolved: Resolved, block_size: int) -> RunnerKernels:
    dtype, vocab_size = resolved.config.dtype, resolved.limits.vocab_size
    greedy = {}
    note = {}
    mask = {}
    for name in sorted({dtype, "float32"}):
        key = getattr(torch, name)
        greedy[key] = build.op("greedy", vocab_size=vocab_size, dtype=name)
        note[key] = build.op("note_tokens", vocab_size=vocab_size, dtype=name)
        mask[key] = build.op("mask_logits", vocab_size=vocab_size, dtype=name)
    return RunnerKernels(
        sample=build.op("sample", vocab_size=vocab_size, dtype="float32"),
        greedy=greedy,
        note=note,
        mask=mask,
        advance=build.op("advance_rows", dtype=dtype),
        map=build.op("map_tokens", block_size=block_size, dtype=dtype),
        gather=build.op("gather_tokens", dtype=dtype),
        verify=build.op("verify_drafts", dtype=dtype),
    )
