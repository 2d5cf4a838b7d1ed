"""The report of a start, for the log and for the clients of a server."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenspeed_core.api.models import ModelInfo
from tokenspeed_core.engine.grammars import GrammarBackend
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.kernels.table import kernel_table
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.resolved import Resolved

if TYPE_CHECKING:
    from tokenspeed_core.worker.local import LocalRunner

_FOLDERS = re.compile(r"(?<![\w:/.-])/(?:[^\s/]+/)+")  # of absolute paths, not of URLs
log = logging.getLogger("tokenspeed.engine")


def start_report(info: ModelInfo, catalog: Catalog, plan: KernelPlan) -> str:
    """Return the model, the plugins and the kernel plan as a JSON object."""
    report = {
        "architecture": info.architecture,
        "plugins": [_public_fields(entry) for entry in catalog.all()],
        "kernel_plan": json.loads(plan.to_json()),
    }
    return json.dumps(report)


def _public_fields(entry: Entry) -> dict[str, Any]:
    """Return an entry for clients of the server, who must not learn the folders of this machine."""
    fields = {k: v for k, v in asdict(entry).items() if k not in ("root", "traceback")}
    for name in ("origin", "reason"):
        fields[name] = _FOLDERS.sub("", fields[name])
    return fields


def log_start(
    resolved: Resolved,
    runner: LocalRunner,
    grammars: GrammarBackend | None,
    num_kv_tokens: int,
    max_model_len: int,
) -> None:
    """Log the kernels, the drafter, bidirectional prompts, the grammar backend, and the size of the KV cache."""
    log.info("%s", kernel_table(runner.kernel_plan))
    if resolved.drafter is not None:
        log.info("speculative decoding: %s", resolved.drafter)
    if resolved.limits.whole_prompts:
        log.info(
            "attention to prompts is bidirectional: each prompt is computed in one step, without prefix caching"
        )
    log.info("structured output: %s", "off" if grammars is None else grammars.entry)
    log.info(
        "%s on %s in %s: a KV cache of %d tokens in blocks of %d, sequences of up to %d tokens",
        resolved.checkpoint.name,
        runner.kernel_plan.platform,
        resolved.config.dtype,
        num_kv_tokens,
        runner.block_size,
        max_model_len,
    )
    layout = runner.layout
    if len(layout.groups) > 1:
        log.info(
            "a page of the KV cache has %d bytes and holds %s",
            layout.page_bytes,
            " or ".join(
                f"{each.blocks_per_page * layout.block_size} tokens of group {each.name}"
                for each in layout.groups
            ),
        )
