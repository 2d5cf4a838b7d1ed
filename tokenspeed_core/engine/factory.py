"""Builds an engine from a configuration: plugins, checkpoint, kernels, memory, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed_core import logs
from tokenspeed_core.api.drafters import DraftCheckpoint
from tokenspeed_core.checkpoint.draft import resolve_draft
from tokenspeed_core.checkpoint.kv_scales import find_kv_scales
from tokenspeed_core.checkpoint.quantization import find_quantization
from tokenspeed_core.checkpoint.resolve import resolve_checkpoint
from tokenspeed_core.config import C, Config
from tokenspeed_core.config.settings import flag
from tokenspeed_core.engine.backends import read_overrides
from tokenspeed_core.engine.drafting import check_is_alone, find_drafter, use_drafter
from tokenspeed_core.engine.engine import MAX_FAILURES, Engine
from tokenspeed_core.engine.environment import prepare_torch, unused_settings
from tokenspeed_core.engine.grammars import GrammarBackend, Grammars, find_backend
from tokenspeed_core.engine.messages import Ready
from tokenspeed_core.engine.report import log_start, start_report
from tokenspeed_core.engine.requests import Defaults
from tokenspeed_core.engine.runners import build_runner
from tokenspeed_core.engine.warmup import warm_up
from tokenspeed_core.errors import CapacityError, ConfigError, EngineDeadError
from tokenspeed_core.executor import Ranks, find_executor, start_ranks
from tokenspeed_core.executor.lockstep import LockstepRunner, Peers
from tokenspeed_core.kernels.error_attribution import no_finite_logits
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.plugins.selection import Selection
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.plugin_policy import find_policy
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.text.load import tokenizer_folder

if TYPE_CHECKING:
    from tokenspeed_core.kernels.plan import KernelPlan
    from tokenspeed_core.worker.local import LocalRunner, Progress

log = logging.getLogger("tokenspeed.engine")


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, its limits and report for the API workers, and its kernel plan."""

    engine: Engine
    ready: Ready
    kernel_plan: KernelPlan
    ranks: Ranks | None = None  # the other processes of the engine, if it has any
    lockstep: LockstepRunner | None = None  # if the engine shares experts with others


def discover(config: Config) -> Catalog:
    """Return the catalog of the plugins that a configuration allows. Raises PluginError."""
    selection = Selection.read(no_plugins=config.no_plugins, lock=config.plugins_lock)
    return Catalog.discover(selection, strict=config.strict_plugins)


def discover_in_subprocess(
    kind: type[C], settings: Mapping[str, Any], process: str
) -> tuple[C, Catalog]:
    """Return the configuration and the plugins of a subprocess, and set up its log.

    `settings` come from the parent; `process` is the name of the subprocess in log lines. Raises PluginError if the
    parent found other plugins.
    """
    config = kind.from_wire(settings["config"])
    logs.set_up_log(config.log_level, config.log_format, process)
    catalog = discover(config)
    catalog.verify(settings["catalog_digest"])
    return config, catalog


def resolve(
    config: Config,
    catalog: Catalog,
    *,
    num_threads: int | None = None,
    with_weights: bool = True,
    rank: int = 0,
    replica: int = 0,
) -> Resolved:
    """Find the checkpoint, downloading it if needed, and resolve the settings that depend on it.

    Without `with_weights`, weight files are not downloaded. `rank` is that of this process in its engine, and `replica`
    the number of the engine. Raises CheckpointError, PluginError or ConfigError.
    """
    checkpoint = resolve_checkpoint(config, catalog, with_weights=with_weights)
    info = checkpoint.info
    max_model_len = config.max_model_len or info.max_model_len
    if max_model_len > info.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len}: {checkpoint.name} supports {info.max_model_len} tokens; "
            "give at most that, or change the model's length with --hf-overrides"
        )
    settled = config.resolved(
        max_model_len=max_model_len,
        dtype=info.dtype if config.dtype == "auto" else config.dtype,
    )
    target = DraftCheckpoint(checkpoint.path, checkpoint.config, checkpoint.spec, info)
    drafter = find_drafter(
        config.speculation(),
        catalog,
        target,
        partial(resolve_draft, config=config, catalog=catalog, with_weights=with_weights),
    )
    check_is_alone(drafter, config.parallel_sizes())
    limits = SchedulerLimits(
        config.max_num_seqs,
        max_model_len,
        config.chunked_prefill_size,
        config.max_prefill_tokens,
        config.max_queued_requests,
        info.vocab_size,
        config.seed + replica,  # engines draw different numbers
        config.max_queued_tokens,
        config.max_sequences_per_key,
        max_drafts=0 if drafter is None else drafter.max_drafts,
        whole_prompts=info.is_bidirectional,
    )
    return Resolved(
        config=settled,
        checkpoint=checkpoint,
        limits=limits,
        quantization=find_quantization(config.quantization, checkpoint, catalog),
        overrides=read_overrides(
            config, catalog, has_draft_model=drafter is not None and drafter.model is not None
        ),
        kv_scales=find_kv_scales(config, checkpoint, catalog),
        policy=find_policy(config.schedule_policy, catalog),
        num_threads=num_threads,
        grammars=find_backend(config.grammar_backend, catalog),
        parallel=config.parallel_sizes().layout(rank, replica),
        executor=find_executor(config, catalog),
        drafter=drafter,
        replica=replica,
    )


def start(
    resolved: Resolved,
    catalog: Catalog,
    hooks: Hooks,
    progress: Progress,
    *,
    is_batch: bool = False,
    on_failure: Callable[[str], None] = lambda reason: None,
    peers: Peers | None = None,
    folder: Path | None = None,
) -> Started:
    """Load the model, size the KV cache, and build the engine, with its other ranks if it has several processes.

    `is_batch` removes the limit on waiting requests and the limit on prefill while others decode. `on_failure` is
    called from another thread if a rank or one of `peers` fails. `peers` are the engines that share the experts. The
    sockets of the ranks are made within `folder`. Raises the errors of `resolve`, SelectionError, CapacityError if memory
    is too small, and EngineDeadError if the warm-up fails or computes logits that are not finite, or if a rank fails.
    """
    prepare_torch()
    if is_batch and resolved.config.kv_events_config is not None:
        raise ConfigError("kv_events_config is not supported by LLM; use AsyncLLM or the server")
    ranks = start_ranks(resolved, catalog, on_failure, peers, folder)
    try:
        if peers is not None:
            peers.watch(on_failure)
        return _start(resolved, catalog, hooks, progress, ranks, peers, is_batch=is_batch)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _start(
    resolved: Resolved,
    catalog: Catalog,
    hooks: Hooks,
    progress: Progress,
    ranks: Ranks | None,
    peers: Peers | None,
    *,
    is_batch: bool,
) -> Started:
    """Do the work of `start`, with `ranks` for several processes and `peers` for engines that share experts."""
    progress("libraries", 0, 1)  # importing them takes seconds
    from tokenspeed_core.worker.platform import resolve_device

    progress("libraries", 1, 1)
    is_cpu = resolve_device(resolved.config.device).type == "cpu"
    backend = _grammar_backend(resolved)
    runner, executed = build_runner(resolved, catalog, progress, ranks, peers)
    try:
        scheduler = _make_scheduler(resolved, runner, is_batch=is_batch)
        # On a CPU a step is complete when its launch returns, so there is nothing to overlap.
        depth = 1 if is_cpu else 2
        _check_warmup(Engine(scheduler, executed, depth=depth, max_failures=0), resolved, runner)
    except BaseException:
        executed.close()  # frees captured graphs, for which the shutdown of NCCL would wait
        raise
    config = resolved.config
    for name, reason in unused_settings(resolved, is_cpu=is_cpu).items():
        log.warning("%s has %s", flag(name), reason)
    if resolved.drafter is not None:
        # A captured step has draft tokens or prompts, not both.
        is_captured = not (is_cpu or config.enforce_eager)
        use_drafter(scheduler, resolved.drafter, with_prompts=not is_captured)
    grammars = None if backend is None else Grammars(scheduler, backend, mask=runner.mask_buffer())
    if backend is not None and not is_batch:
        backend.compiler()  # indexing a large vocabulary would stall the steps later
    engine = Engine(
        scheduler,
        executed,
        depth=depth,
        grammars=grammars,
        observe=hooks.observer("observe_step"),
        bounds_decode_latency=not is_batch,
        # After a failed step the ranks or engines are no longer in step.
        max_failures=MAX_FAILURES if executed is runner else 0,
    )
    num_kv_tokens, max_model_len = scheduler.kv.max_sequence_len, scheduler.limits.max_model_len
    log_start(resolved, runner, backend, num_kv_tokens, max_model_len)
    info = resolved.checkpoint.info
    report = start_report(info, catalog, runner.kernel_plan)
    ready = Ready(
        max_model_len,
        num_kv_tokens,
        info.vocab_size,
        report,
        is_bidirectional=info.is_bidirectional,
    )
    lockstep = executed if isinstance(executed, LockstepRunner) else None
    return Started(engine, ready, runner.kernel_plan, ranks, lockstep)


def _check_warmup(engine: Engine, resolved: Resolved, runner: LocalRunner) -> None:
    """Serve the warm-up requests. Raises EngineDeadError if they fail, or if their logits are not finite."""
    is_finite = warm_up(engine)
    # Dummy weights may give any logits.
    if not is_finite and resolved.config.load_format != "dummy":
        raise EngineDeadError(no_finite_logits(runner.kernel_plan))
    engine.scheduler.counters.reset()  # without the warm-up


def _make_scheduler(resolved: Resolved, runner: LocalRunner, *, is_batch: bool) -> Scheduler:
    """Return a scheduler for the runner's KV cache. Raises CapacityError if that is too small."""
    kv = KVManager(
        resolved.cache_groups,
        runner.block_size,
        runner.num_pages,
        blocks_per_page=runner.layout.blocks_per_page,
        max_chunk=resolved.limits.max_chunk,
        # With bidirectional attention, equal prefixes have different cache entries.
        prefix_caching=resolved.config.enable_prefix_caching and not resolved.limits.whole_prompts,
    )
    max_model_len = _fit_model_len(resolved, kv.max_sequence_len)
    limits = replace(resolved.limits, max_model_len=max_model_len)
    if is_batch:
        limits = replace(
            limits, max_queued=2**31 - 1, max_queued_tokens=None, max_live_per_tenant=None
        )
    return Scheduler(limits, kv, resolved.policy)


def _grammar_backend(resolved: Resolved) -> GrammarBackend | None:
    """Return the backend of structured output, if there is one and the model can use it."""
    config, checkpoint = resolved.config, resolved.checkpoint
    eos_ids = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids).eos_token_ids
    found = resolved.grammars
    if found is None or config.skip_tokenizer_init:
        return None
    if not eos_ids:
        log.warning(
            "Structured output is disabled: %s has no end-of-sequence token. Add eos_token_id to its generation_config.json.",
            checkpoint.name,
        )
        return None
    return GrammarBackend(
        *found, tokenizer_folder(config, checkpoint.path), checkpoint.info.vocab_size, eos_ids
    )


def _fit_model_len(resolved: Resolved, num_kv_tokens: int) -> int:
    """Return the longest sequence that fits both the model and the KV cache. Raises CapacityError."""
    config, max_model_len = resolved.config, resolved.limits.max_model_len
    if max_model_len <= num_kv_tokens:
        return max_model_len
    # Only a KV cache of a configured size can be too small: otherwise the worker has refused to start.
    if config.origin("max_model_len") != "auto":
        sized_by = "--kv-cache-memory" if config.max_total_tokens is None else "--max-total-tokens"
        raise CapacityError(
            f"--max-model-len {max_model_len} does not fit: the KV cache holds {num_kv_tokens} tokens; "
            f"give at most that, or a larger {sized_by}"
        )
    log.warning(
        "the KV cache holds %d tokens, fewer than the model's context of %d; sequences are limited to the size of the KV cache",
        num_kv_tokens,
        max_model_len,
    )
    return num_kv_tokens
