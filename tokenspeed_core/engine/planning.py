"""Plans the start of an engine without loading weights: plugins, settings, kernels and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.api.models import LoadFormat
from tokenspeed_core.api.quantization import QuantizationScheme
from tokenspeed_core.checkpoint.draft import check_draft_weights
from tokenspeed_core.checkpoint.resolve import choose_format
from tokenspeed_core.config import Config
from tokenspeed_core.config.parallel_settings import LOCAL
from tokenspeed_core.engine.environment import prepare_torch, unused_settings
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.resolved import Resolved

if TYPE_CHECKING:
    from tokenspeed_core.kernels.plan import KernelPlan


@dataclass(frozen=True, slots=True)
class StartPlan:
    """The plugins, settings, kernels and memory with which an engine would start."""

    catalog: Catalog
    resolved: Resolved
    weights: LoadFormat
    kernel_plan: KernelPlan
    memory: Mapping[str, Any]  # bytes by use; None: known after start
    schemes: Mapping[str, QuantizationScheme | None]  # of each linear layer
    unused_settings: Mapping[str, str]  # the reason by setting


def plan_start(config: Config) -> StartPlan:
    """Plan a start. Raises the errors of a start up to the loading of weights."""
    catalog, resolved = _resolve(config)
    from tokenspeed_core.worker.local import plan_only
    from tokenspeed_core.worker.platform import check_num_devices, resolve_device

    sizes = config.parallel_sizes()
    if config.distributed_executor_backend == LOCAL or sizes.num_engines > 1:
        check_num_devices(config.device, sizes.num_per_node, sizes.num_engines)
    checkpoint = resolved.checkpoint
    weights = choose_format(checkpoint.files, config.load_format, catalog, checkpoint.path)
    check_draft_weights(resolved.config, catalog)
    plan, memory, schemes = plan_only(resolved, catalog)
    is_cpu = resolve_device(resolved.config.device).type == "cpu"
    unused = unused_settings(resolved, is_cpu=is_cpu)
    return StartPlan(catalog, resolved, weights, plan, memory, schemes, unused)


def plan_kernels(
    config: Config, platform: PlatformInfo | None = None
) -> tuple[Catalog, KernelPlan]:
    """Select the kernels for this machine, or for another platform with the plugins installed here.

    Raises the errors of `resolve`, and SelectionError.
    """
    catalog, resolved = _resolve(config)
    from tokenspeed_core.worker.assemble import plan_for

    return catalog, plan_for(resolved, catalog, platform)


def _resolve(config: Config) -> tuple[Catalog, Resolved]:
    catalog = discover(config)
    adjusted = Hooks.load(catalog).adjust_config(config)
    resolved = resolve(adjusted, catalog, with_weights=False)
    prepare_torch()
    return catalog, resolved
