"""From a configuration to a running engine: checkpoint, family, kernels, memory, scheduler."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.api.models import Quantization
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, choose_format, resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.config.backends import AUTO
from tokenspeed_core.config.build import called
from tokenspeed_core.config.describe import as_written
from tokenspeed_core.config.schema import flag
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.messages import Ready
from tokenspeed_core.engine.warmup import rehearse
from tokenspeed_core.errors import CapacityError, ConfigError, EngineDeadError
from tokenspeed_core.kernels.error_attribution import no_finite_logits
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.table import kernel_table
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.plugins.selection import Selection
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy_plugins import find_policy
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.text.load import find_parsers, load_text

if TYPE_CHECKING:
    from tokenspeed_core.kernels.plan import KernelPlan
    from tokenspeed_core.worker.local import Progress

PROCESSORS_FOR_TWO = (
    16  # API workers; events queue in one, which doubles the 99th percentile of gaps
)

_GPU_SETTINGS = (
    "enforce_eager",
    "max_cudagraph_capture_size",
    "cudagraph_capture_sizes",
    "gpu_memory_utilization",
)

log = logging.getLogger("tokenspeed.engine")


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, its limits as the API workers hear them, and why its kernels run."""

    engine: Engine
    ready: Ready
    kernel_plan: KernelPlan


def discover(config: Config) -> Catalog:
    """Return the catalog that a configuration allows. Raises PluginError."""
    selection = Selection.read(no_plugins=config.no_plugins, lock=config.plugins_lock)
    return Catalog.discover(selection, strict=config.strict_plugins)


def discover_in_subprocess(told: Mapping[str, Any]) -> tuple[Config, Catalog]:
    """Return the configuration of the process that started this one, and its plugins; log as it does.

    Raises PluginError where other plugins are found here than there.
    """
    config = Config.from_wire(told["config"])
    logging.basicConfig(
        level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    catalog = discover(config)
    catalog.verify(told["catalog_digest"])
    return config, catalog


def num_workers(config: Config) -> int:
    """Return how many processes serve HTTP: as many as somebody said, else two where there are processors to spare."""
    return config.api_workers or (2 if len(os.sched_getaffinity(0)) >= PROCESSORS_FOR_TWO else 1)


def resolve(
    config: Config, catalog: Catalog, *, num_threads: int | None = None, with_weights: bool = True
) -> Resolved:
    """Find the checkpoint, downloading it if need be (`with_weights` or not), and settle what follows from it.

    Raises CheckpointError, PluginError or ConfigError, each in one line that says what to do.
    """
    checkpoint = resolve_checkpoint(config, catalog, with_weights=with_weights)
    info = checkpoint.info
    max_model_len = config.max_model_len or info.max_model_len
    if max_model_len > info.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len}: {checkpoint.name} was made for {info.max_model_len} tokens; give at "
            "most that, or change the model's own length with --hf-overrides"
        )
    settled = config.resolved(
        max_model_len=max_model_len,
        dtype=info.dtype if config.dtype == "auto" else config.dtype,
    )
    limits = SchedulerLimits(
        config.max_num_seqs,
        max_model_len,
        config.chunked_prefill_size,
        config.max_prefill_tokens,
        config.max_queued_requests,
        info.vocab_size,
        config.seed,
    )
    wanted = config.quantization or info.quantization
    if info.quantization is not None and wanted != info.quantization:
        raise ConfigError(
            f"--quantization {wanted}: {checkpoint.name} is {info.quantization} already; leave it out"
        )
    method = (
        None if wanted is None else catalog.need(catalog.get("quantization", wanted), Quantization)
    )
    if method is not None and method.has_tensor_scales and info.quantization is None:
        raise ConfigError(
            f"--quantization {wanted}: its scales of activations are measured on prompts, and "
            f"{checkpoint.name} has none; give a checkpoint that is {wanted} already, or another method"
        )
    return Resolved(
        config=settled,
        checkpoint=checkpoint,
        limits=limits,
        quantization=method,
        overrides=read_overrides(config),
        kv_scales=read_kv_scales(config.quantization_param_path, info.num_layers),
        policy=find_policy(config.schedule_policy, catalog),
        num_threads=num_threads,
    )


def start(
    resolved: Resolved,
    catalog: Catalog,
    hooks: Hooks,
    progress: Progress,
    *,
    is_batch: bool = False,
) -> Started:
    """Load the model, size the pool, and put the engine together. `hooks` are those of this process.

    `is_batch` is for a caller who brings all requests and waits for all: no queue is too long, no token urgent.
    Raises what `resolve` does, SelectionError, CapacityError where memory is too small, and EngineDeadError where a
    request of its own fails, or none gets finite logits.
    """
    _prepare_for_torch()
    from tokenspeed_core.worker.local import build
    from tokenspeed_core.worker.platform import resolve_device

    config, info = resolved.config, resolved.checkpoint.info
    runner = build(resolved, catalog, progress)
    kv = KVManager(
        info.cache_groups,
        runner.block_size,
        runner.num_blocks,
        prefix_caching=config.enable_prefix_caching,
    )
    max_model_len = _fitting_len(resolved, kv.max_tokens_in_pool())
    max_queued = 2**31 - 1 if is_batch else config.max_queued_requests
    limits = replace(resolved.limits, max_model_len=max_model_len, max_queued=max_queued)
    scheduler = Scheduler(limits, kv, resolved.policy)
    is_cpu = resolve_device(config.device).type == "cpu"
    for name, reason in unused_settings(config, is_cpu=is_cpu).items():
        log.warning("%s has %s", flag(name), reason)
    depth = (
        1 if is_cpu else 2
    )  # on the CPU a step is over when it is launched: there is nothing to run ahead of
    is_fine = rehearse(Engine(scheduler, runner, depth=depth, max_failures=0), max_model_len)
    if not is_fine and config.load_format != "dummy":  # of which any logits may come
        raise EngineDeadError(no_finite_logits(runner.kernel_plan))
    engine = Engine(
        scheduler,
        runner,
        depth=depth,
        observe=hooks.observer("observe_step"),
        limits_prefill_while_decoding=not is_batch,
    )
    report = {
        "model": resolved.checkpoint.name,
        "architecture": info.architecture,
        "plugins": [asdict(entry) for entry in catalog.all()],
        "kernel_plan": json.loads(runner.kernel_plan.to_json()),
    }
    log.info("%s", kernel_table(runner.kernel_plan))
    log.info(
        "%s on %s in %s: a KV cache of %d tokens in blocks of %d, sequences of up to %d tokens",
        resolved.checkpoint.name,
        runner.kernel_plan.platform,
        config.dtype,
        kv.max_tokens_in_pool(),
        runner.block_size,
        max_model_len,
    )
    ready = Ready(max_model_len, kv.max_tokens_in_pool(), info.vocab_size, json.dumps(report))
    return Started(engine, ready, runner.kernel_plan)


def unused_settings(config: Config, *, is_cpu: bool) -> dict[str, str]:
    """Return the settings that a person gave and that have no effect here, with the reason."""
    reasons: dict[str, str] = {}
    if is_cpu:
        reasons = dict.fromkeys(_GPU_SETTINGS, "no effect on a CPU")
    if config.chunked_prefill_size > 0:
        reasons["max_prefill_tokens"] = "no effect unless --chunked-prefill-size is -1"
    return {name: why for name, why in reasons.items() if config.origin(name) != "default"}


def _prepare_for_torch() -> None:
    """Do what comes before the first import of torch. Raises ConfigError where it is not installed."""
    if find_spec("torch") is None:
        raise ConfigError(
            "a model runs on torch, which is not installed: `pip install 'tokenspeed-core[default]'`"
        )
    # Read when torch is loaded. A CPU's threads that spin while they wait make a step several times as long as soon as
    # another program keeps one core busy; where none does, sleeping costs about a tenth.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def dry_run(config: Config) -> str:
    """Resolve everything and load nothing; return the report for people."""
    catalog = discover(config)
    adjusted = Hooks.load(catalog).adjust_config(config)
    resolved = resolve(
        adjusted.resolved(api_workers=num_workers(adjusted)), catalog, with_weights=False
    )
    _prepare_for_torch()
    from tokenspeed_core.worker.local import plan_only
    from tokenspeed_core.worker.platform import resolve_device

    config, checkpoint, info = resolved.config, resolved.checkpoint, resolved.checkpoint.info
    weights = choose_format(checkpoint.files, config.load_format, catalog)
    text = _describe_text(config, checkpoint)
    find_parsers(config, catalog)
    plan, memory = plan_only(resolved, catalog)
    is_cpu = resolve_device(config.device).type == "cpu"
    unused = unused_settings(config, is_cpu=is_cpu)
    changed = []
    for name in type(config).model_fields:
        if config.origin(name) != "default" and name != "api_key":
            line = f"  {name}: {as_written(getattr(config, name))} ({config.origin(name)})"
            changed.append(f"{line}: {unused[name]}" if name in unused else line)
    return "\n".join(
        [
            f"model {checkpoint.name}: {info.architecture}, {info.num_parameters:,} parameters, {checkpoint.path}",
            f"weights {weights.name}",
            text,
            "settings",
            *changed,
            "memory",
            *(
                f"  {name}: {'known after start' if n is None else f'{n:,}'}"
                for name, n in memory.items()
            ),
            kernel_table(plan),
            "collectives: none (one process)",
        ]
    )


def plan_kernels(
    config: Config, platform: PlatformInfo | None = None
) -> tuple[Catalog, KernelPlan]:
    """Decide the kernels alone, for this machine or for another platform with what is installed here.

    Raises as `resolve` does, and SelectionError.
    """
    catalog = discover(config)
    adjusted = Hooks.load(catalog).adjust_config(config)
    resolved = resolve(adjusted, catalog, with_weights=False)
    _prepare_for_torch()
    from tokenspeed_core.worker.assemble import plan_for

    return catalog, plan_for(resolved, catalog, platform)


def _describe_text(config: Config, checkpoint: ResolvedCheckpoint) -> str:
    """Load the tokenizer and the chat template, and say what they are. Raises CheckpointError."""
    tokenizer, template = load_text(config, checkpoint.path)
    if tokenizer is None:
        return "tokenizer none: token ids only"
    where = "none" if template is None else config.chat_template or "the model's own"
    return f"tokenizer {config.tokenizer or checkpoint.path}, chat template: {where}"


def read_overrides(config: Config) -> tuple[Override, ...]:
    """Return what the user asked of backends. Raises ConfigError."""
    found: list[Override] = []
    for family in ("attention", "moe", "sampling"):
        _, where = called(family, config.origin(f"{family}_backend"))
        for key, names in getattr(config, f"{family}_backend").items():
            scope = "" if key == "default" else f".{key}"
            if scope or names != AUTO:
                found.append(
                    Override.parse(f"{family}{scope}", names, f"--{family}-backend{scope}{where}")
                )
    _, where = called("kernel", config.origin("kernel_backend"))
    for scope, names in config.kernel_backend.items():
        found.append(Override.parse(scope, names, f"--kernel-backend {scope}{where}"))
    return tuple(found)


def read_kv_scales(path: str | None, num_layers: int) -> tuple[float, ...]:
    """Return each layer's scale from `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02, "1": ...}}}}`, none of no file.

    The outer key is the process, of which there is one. Raises ConfigError, naming the file and what it lacks.
    """
    if path is None:
        return ()
    try:
        factors = json.loads(Path(path).read_text())["kv_cache"]["scaling_factor"]["0"]
        scales = tuple(float(factors[str(layer)]) for layer in range(num_layers))
        if not all(0 < scale < float("inf") for scale in scales):
            raise ValueError("its scales are not all above 0 and finite")
        return scales
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--quantization-param-path {path}: {type(error).__name__} {error}; it must hold "
            f'{{"kv_cache": {{"scaling_factor": {{"0": {{"0": NUMBER, ...}}}}}}}} for layers 0 to {num_layers - 1}'
        ) from error


def _fitting_len(resolved: Resolved, max_tokens_in_pool: int) -> int:
    """Return the longest sequence that both the model and the pool allow.

    A pool that no flag sizes holds the longest sequence, or the runner has said so.
    """
    config, wanted = resolved.config, resolved.limits.max_model_len
    if wanted <= max_tokens_in_pool:
        return wanted
    if config.origin("max_model_len") != "auto":
        sized_by = "--kv-cache-memory" if config.max_total_tokens is None else "--max-total-tokens"
        raise CapacityError(
            f"--max-model-len {wanted} does not fit: the KV cache holds {max_tokens_in_pool} tokens; give at most that, or "
            f"a larger {sized_by}"
        )
    log.warning(
        "the KV cache holds %d tokens, fewer than the model's %d: sequences end there",
        max_tokens_in_pool,
        wanted,
    )
    return max_tokens_in_pool
