"""What a start would decide, without loading weights: the report of `serve --dry-run`, and the kernel plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.checkpoint.quantization import describe_schemes
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, choose_format
from tokenspeed_core.config import Config
from tokenspeed_core.config.describe import as_written
from tokenspeed_core.config.schema import setting_names
from tokenspeed_core.engine.factory import (
    discover,
    load_text,
    model_traits,
    num_workers,
    prepare_torch,
    resolve,
    unused_settings,
)
from tokenspeed_core.engine.reply_parsers import describe_parsers, find_parsers
from tokenspeed_core.kernels.table import kernel_table
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hooks import Hooks

if TYPE_CHECKING:
    from tokenspeed_core.kernels.plan import KernelPlan


def dry_run(config: Config) -> str:
    """Resolve everything and return a report. Raises what a start would raise before it loads weights."""
    catalog = discover(config)
    adjusted = Hooks.load(catalog).adjust_config(config)
    resolved = resolve(
        adjusted.resolved(api_workers=num_workers(adjusted)), catalog, with_weights=False
    )
    prepare_torch()
    from tokenspeed_core.worker.local import plan_only
    from tokenspeed_core.worker.platform import resolve_device

    config, checkpoint, info = resolved.config, resolved.checkpoint, resolved.checkpoint.info
    weights = choose_format(checkpoint.files, config.load_format, catalog)
    text = _describe_text(config, checkpoint)
    parsers = find_parsers(config, catalog, model_traits(config, checkpoint))
    plan, memory, schemes = plan_only(resolved, catalog)
    is_cpu = resolve_device(config.device).type == "cpu"
    return "\n".join(
        [
            f"model {checkpoint.name}: {info.architecture}, {info.num_parameters:,} parameters, {checkpoint.path}",
            f"weights {weights.name}",
            text,
            describe_parsers(config, parsers),
            "settings",
            *_describe_settings(config, is_cpu=is_cpu),
            "memory",
            *(
                f"  {name}: {'known after start' if size is None else f'{size:,}'}"
                for name, size in memory.items()
            ),
            *describe_schemes(resolved.quantization, schemes),
            kernel_table(plan),
            "collectives: none (one process)",
        ]
    )


def plan_kernels(
    config: Config, platform: PlatformInfo | None = None
) -> tuple[Catalog, KernelPlan]:
    """Select the kernels for this machine, or for another platform with the plugins installed here.

    Raises what `resolve` raises, and SelectionError.
    """
    catalog = discover(config)
    adjusted = Hooks.load(catalog).adjust_config(config)
    resolved = resolve(adjusted, catalog, with_weights=False)
    prepare_torch()
    from tokenspeed_core.worker.assemble import plan_for

    return catalog, plan_for(resolved, catalog, platform)


def _describe_settings(config: Config, *, is_cpu: bool) -> list[str]:
    """Return a line for each setting that is not at its default, with its origin."""
    unused = unused_settings(config, is_cpu=is_cpu)
    lines = []
    for name in setting_names():
        if config.origin(name) != "default" and name != "api_key":
            line = f"  {name}: {as_written(getattr(config, name))} ({config.origin(name)})"
            lines.append(f"{line}: {unused[name]}" if name in unused else line)
    return lines


def _describe_text(config: Config, checkpoint: ResolvedCheckpoint) -> str:
    """Load the tokenizer and the chat template, and return where they come from. Raises CheckpointError."""
    tokenizer, template = load_text(config, checkpoint.path)
    if tokenizer is None:
        return "tokenizer none: token ids only"
    origin = "none" if template is None else config.chat_template or "from the model"
    return f"tokenizer {config.tokenizer or checkpoint.path}, chat template: {origin}"
