"""The report of `tokenspeed serve --dry-run`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from tokenspeed_core.commands.planning import (
    StartPlan,
    as_written,
    kernel_table,
    plan_start,
)
from tokenspeed_core.commands.serving import load_text
from tokenspeed_server.listen import check_address
from tokenspeed_server.reply_parsers import describe_parsers, find_parsers, model_traits
from tokenspeed_server.settings import ServerConfig


def dry_run(config: ServerConfig) -> str:
    """Return a report on all decisions of a start before it loads weights. Raises the same errors as a start."""
    check_address(config)
    plan = plan_start(config)
    settled, checkpoint = plan.resolved.config, plan.resolved.checkpoint
    assert isinstance(settled, ServerConfig), "plan_start keeps the class"
    config = settled.resolved(api_workers=settled.num_workers())
    info = checkpoint.info
    text = _describe_text(plan)
    parsers = find_parsers(config, plan.catalog, model_traits(config, checkpoint))
    return "\n".join(
        [
            f"model {checkpoint.name}: {info.architecture}, {info.num_parameters:,} parameters, {checkpoint.path}",
            f"weights {plan.weights.name}",
            f"drafter {plan.resolved.drafter or 'none'}",
            text,
            describe_parsers(config, parsers),
            "settings",
            *_describe_settings(config, plan.unused_settings),
            "memory",
            *(
                f"  {name}: {'known after start' if size is None else f'{size:,}'}"
                for name, size in plan.memory.items()
            ),
            *_describe_quantization(plan),
            kernel_table(plan.kernel_plan),
            f"processes: {config.parallel_sizes().describe(has_experts=bool(plan.kernel_plan.find('moe')))}",
        ]
    )


def _describe_text(plan: StartPlan) -> str:
    """Load the tokenizer and the chat template, and return where they come from. Raises CheckpointError."""
    config, path = plan.resolved.config, plan.resolved.checkpoint.path
    tokenizer, template = load_text(config, path)
    if tokenizer is None:
        return "tokenizer none: token ids only"
    origin = "none" if template is None else config.chat_template or "from the model"
    return f"tokenizer {config.tokenizer or path}, chat template: {origin}"


def _describe_settings(config: ServerConfig, unused: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each setting that is not at its default, with its origin."""
    for name in config.setting_names():
        if config.origin(name) != "default" and not config.metadata(name)["is_secret"]:
            line = f"  {name}: {as_written(getattr(config, name))} ({config.origin(name)})"
            reason = unused.get(name)
            yield f"{line}: {reason}" if reason else line


def _describe_quantization(plan: StartPlan) -> Iterator[str]:
    """Yield the method, then the scheme and the number of the layers of each kind."""
    method = plan.resolved.quantization
    if method is None:
        return
    yield f"quantization {method.name}"
    counts = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)", "*", layer), "none" if scheme is None else scheme.name)
        for layer, scheme in plan.schemes.items()
    )
    for (layer, scheme), count in counts.items():
        yield f"  {layer}: {scheme} ({count} of them)"
