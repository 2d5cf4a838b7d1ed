"""Builds the local runner: weights, memory measurement, the arena, warm-up and graph capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from tokenspeed_core.api.models import BlockDraftModel, DraftModel, Model, WeightReader
from tokenspeed_core.api.quantization import QuantizationScheme
from tokenspeed_core.api.step import OutOfMemory
from tokenspeed_core.checkpoint.resolve import DRAFT_FORMAT_FLAG, FORMAT_FLAG, choose_format
from tokenspeed_core.errors import CapacityError, CheckpointError
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.kv_cache.page_layout import PageLayout
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.targets import load_target
from tokenspeed_core.worker.adjust import counts_bytes
from tokenspeed_core.worker.assemble import Assembly, assemble
from tokenspeed_core.worker.buckets import bucket_sizes, decode_sizes, draft_sizes, followed_sizes
from tokenspeed_core.worker.execute import LocalRunner
from tokenspeed_core.worker.expert_balancer import ExpertBalancer
from tokenspeed_core.worker.memory import GIB, DeviceBudget, pages_of_device, pages_of_host
from tokenspeed_core.worker.platform import resolve_device
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_core.worker.warmup import WarmupStep, largest_step, warmup_steps, with_next_drafts

__all__ = ["LocalRunner", "build", "plan_only"]

log = logging.getLogger("tokenspeed.worker")

Progress = Callable[[str, int, int], None]
Agree = Callable[[int], int]
"""Returns the smallest of the values that all ranks give."""
_GRAPH_BYTES = 4 << 20  # memory of one captured forward
_SLACK = 256 << 20  # late allocations of libraries, and fragmentation


def build(
    resolved: Resolved,
    catalog: Catalog,
    progress: Progress,
    *,
    handles: Mapping[str, Any] | None = None,
    agree: Agree = int,
) -> LocalRunner:
    """Return a runner that is ready to serve. `progress(what, done, total)` is called for each stage.

    All ranks of an engine call it at the same time. `handles` are the result of `worker.distributed.init`. `agree`
    returns the smallest of the ranks' values, so that all ranks have KV caches of the same size.
    Raises CheckpointError, SelectionError, ConfigError or CapacityError.
    """
    device = resolve_device(resolved.config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if resolved.num_threads is not None:
        torch.set_num_threads(resolved.num_threads)
    dtype, num_parameters = resolved.config.dtype, resolved.num_parameters
    weights = num_parameters * getattr(torch, dtype).itemsize / GIB
    with _room_for(
        f"The model ({weights:.2f} GiB of weights in {dtype})",
        "Free device memory, choose a smaller model, or use --dtype or --quantization",
    ):
        assembly = assemble(resolved, catalog, device, handles=handles)
        _log_kernel_notices(assembly.selector.plan(), device)
        # Before the weights, so that kernels compile while the weights load.
        assembly.build.bind_attention(assembly.limits)
        config, path = resolved.config, resolved.checkpoint.path
        _load_weights(assembly.model, path, config.load_format, catalog, progress)
        info = resolved.draft_model
        if assembly.draft_model is not None and info is not None:
            wanted = config.draft_load_format
            flag = FORMAT_FLAG if info.weights == path else DRAFT_FORMAT_FLAG
            _load_weights(assembly.draft_model, info.weights, wanted, catalog, progress, flag)
    balancer = _balancer(assembly, handles)  # allocates memory, which the KV cache must not use
    if device.type == "cpu":
        runner = LocalRunner(assembly, agree(_host_pages(assembly)))
    else:
        runner = _start_on_device(assembly, device, progress, agree)
    if balancer is not None:
        runner.balance_experts(balancer)
    return runner


def _balancer(assembly: Assembly, handles: Mapping[str, Any] | None) -> ExpertBalancer | None:
    """Return the balancer of the experts' load, or None without --enable-eplb. Raises ConfigError."""
    balance, resolved = assembly.build.expert_balance, assembly.resolved
    if balance is None or handles is None:
        return None
    return ExpertBalancer(balance, resolved.parallel, handles, resolved.config.eplb_interval)


def plan_only(
    resolved: Resolved, catalog: Catalog
) -> tuple[KernelPlan, Mapping[str, Any], Mapping[str, QuantizationScheme | None]]:
    """Return the kernel plan, the memory in bytes and the scheme of each linear layer.

    Loads no weights and allocates nothing on the device. Raises as `build` does.
    """
    config = resolved.config
    device = resolve_device(config.device)
    assembly = assemble(resolved, catalog, device, only_plan=True)
    weights = _weight_bytes(assembly)
    is_cpu = device.type == "cpu"
    plan = assembly.selector.plan()
    _log_kernel_notices(plan, device)
    total = (
        int(psutil.virtual_memory().total)
        if is_cpu
        else torch.cuda.get_device_properties(device).total_memory
    )
    pages = _host_pages(assembly) if is_cpu else _wanted_pages(assembly)
    left = (
        {}
        if is_cpu or not weights
        else {"left_bytes": int(total * config.gpu_memory_utilization) - weights}
    )
    sizes = {
        "device_bytes": total,
        "weight_bytes": weights,
        "block_size": assembly.block_size,
        "page_bytes": assembly.pool.page_bytes,
        "num_pages": pages,
        **_describe_groups(assembly.pool.layout),
        **left,
    }
    return plan, sizes, assembly.build.schemes


def _weight_bytes(assembly: Assembly) -> int | None:
    """Return the bytes of this process's weights; None if they depend on how the weights are quantized."""
    resolved = assembly.resolved
    if resolved.quantization is not None:
        return None
    if resolved.parallel.world_size == 1:
        return resolved.num_parameters * assembly.build.dtype.itemsize
    weight_map: Callable[[], Iterable[Any]] | None = getattr(assembly.model, "weight_map", None)
    if weight_map is None or resolved.draft_model is not None:
        return None
    # Several slots may be views of one tensor.
    storages = (slot.target.untyped_storage() for slot in weight_map())
    sizes: dict[int, int] = {each._cdata: each.nbytes() for each in storages}
    return sum(sizes.values())


def _describe_groups(layout: PageLayout) -> dict[str, float]:
    """Return the bytes that each cache group keeps for a token, and how its blocks fill a page."""
    described: dict[str, float] = {}
    for group in layout.groups:
        described[f"group_{group.name}_bytes_per_token"] = group.bytes_per_token
        described[f"group_{group.name}_blocks_per_page"] = group.blocks_per_page
        described[f"group_{group.name}_unused_percent"] = round(100 * layout.waste(group), 1)
    return described


def _log_kernel_notices(plan: KernelPlan, device: torch.device) -> None:
    """Log third-party kernels that must be named, and ops that run their reference on a GPU."""
    if flags := plan.unused_third_party():
        log.info(
            "auto does not choose third-party kernels without a measured ranking; available: %s",
            ", ".join(flags),
        )
    ops = plan.reference_ops() if device.type == "cuda" else ()
    if ops:
        log.warning(
            "%d ops run their PyTorch reference on this GPU: %s. See `tokenspeed plugins why OP`.",
            len(ops),
            ", ".join(ops),
        )


@contextmanager
def _room_for(what: str, hint: str) -> Iterator[None]:
    """Turn an out-of-memory error into CapacityError, with PyTorch's own text and a hint."""
    try:
        yield
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        summary = str(error).partition("\n")[0]
        raise CapacityError(f"{what} does not fit in memory: {summary} {hint}.") from error


def _load_weights(
    model: Model | DraftModel | BlockDraftModel,
    path: Path,
    wanted: str,
    catalog: Catalog,
    progress: Progress,
    flag: str = FORMAT_FLAG,
) -> None:
    """Load a model's weights from a folder, in the wanted format, which `flag` names. Raises CheckpointError."""
    files = [file.name for file in path.iterdir()] if wanted == "auto" else []
    chosen = choose_format(files, wanted, catalog, path, flag)
    entry = catalog.get("load_formats", chosen.name)
    reader: WeightReader = make(entry, chosen.load, lambda: load_target(chosen.load), Callable)  # type: ignore[arg-type]
    try:
        model.load_weights(
            reader(str(path), model, lambda done, total: progress("weights", done, total))
        )
    except ValueError as error:
        message = str(error)
        named = message if str(path) in message else f"{path}: {message}"
        raise CheckpointError(named) from error


def _start_on_device(
    assembly: Assembly, device: torch.device, progress: Progress, agree: Agree
) -> LocalRunner:
    """Measure the largest step, size the arena by the memory left, warm up all kernels, capture graphs."""
    config, limits = assembly.resolved.config, assembly.resolved.limits
    decodes = (
        ()
        if config.enforce_eager
        else decode_sizes(
            limits.max_num_seqs, config.max_cudagraph_capture_size, config.cudagraph_capture_sizes
        )
    )
    sizes: tuple[BucketSize, ...] = ()
    if decodes:
        sizes = bucket_sizes(decodes, limits.max_num_tokens, limits.max_num_seqs)
        sizes += draft_sizes(decodes, limits.max_drafts, limits.max_draft_tokens)
        if assembly.resolved.draft_model is not None:
            sizes += followed_sizes(sizes, assembly.resolved.num_parameters)
    num_groups = len(assembly.build.groups)
    with _room_for(
        "The largest step", f"Lower {limits.step_flag} or --max-num-seqs, or free device memory"
    ):
        runner = LocalRunner(assembly, num_pages=1)
        budget = _measure(runner, assembly, device, largest_step(limits, num_groups), sizes)
    pages = agree(_wanted_pages(assembly) or pages_of_device(assembly.pool, budget))
    what = f"A KV cache of {pages * runner.layout.page_bytes / GIB:.2f} GiB"
    with _room_for(what, "Lower or omit --max-total-tokens or --kv-cache-memory"):
        runner.resize(pages)
    with _room_for(
        "The warm-up next to the KV cache", "Lower --gpu-memory-utilization or --max-total-tokens"
    ):
        trials = tuple(warmup_steps(limits, num_groups))
        for done, trial in enumerate(trials):
            progress("warm-up", done, len(trials))
            _run(runner, trial)
        progress("warm-up", len(trials), len(trials))
        runner.forget()
        if sizes:
            runner.capture(sizes, lambda done, total: progress("graphs", done, total))
    runner.forget()
    return runner


def _measure(
    runner: LocalRunner,
    assembly: Assembly,
    device: torch.device,
    trial: WarmupStep,
    sizes: Sequence[BucketSize],
) -> DeviceBudget:
    """Run the largest step and measure its memory. Graphs of `sizes` need at most as much again."""
    resolved = assembly.resolved
    config, limits = resolved.config, resolved.limits
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    _run(runner, trial)
    peak = torch.cuda.max_memory_reserved(device) - weights
    runner.forget()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    graphs = len(sizes) * _GRAPH_BYTES + (peak if sizes else 0)
    return DeviceBudget(
        total=total,
        utilization=config.gpu_memory_utilization,
        others=total - free - torch.cuda.memory_reserved(device),
        weights=weights,
        peak=peak,
        reserve=counts_bytes(limits.max_num_seqs + 1, limits.vocab_size) + graphs + _SLACK,
    )


def _run(runner: LocalRunner, trial: WarmupStep) -> None:
    plan = trial.plan
    if runner.resolved.draft_model is not None:
        plan = with_next_drafts(plan, runner.resolved.limits.max_drafts)
    runner.forward(plan)
    runner.sample(plan.step_id, trial.late)
    runner.collect(plan.step_id)


def _wanted_pages(assembly: Assembly) -> int | None:
    """Return the number of pages that the user requested, or None."""
    config, pool = assembly.resolved.config, assembly.pool
    if config.max_total_tokens is not None:
        return pool.pages_of_tokens(config.max_total_tokens)
    if config.kv_cache_memory is not None:
        return pool.pages_of_bytes(config.kv_cache_memory, "--kv-cache-memory")
    return None


def _host_pages(assembly: Assembly) -> int:
    return pages_of_host(
        assembly.pool,
        int(psutil.virtual_memory().available) // assembly.resolved.config.data_parallel_size,
        _wanted_pages(assembly),
    )
