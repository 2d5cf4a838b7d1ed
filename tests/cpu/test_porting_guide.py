"""The porting guide: its names exist and its example passes the conformance kit."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import pytest
from tokenspeed_plugin_tools.command import SUBCOMMANDS
from tokenspeed_testing.kernel import KernelConformance

from tokenspeed_core import api
from tokenspeed_core.config.schema import Config, flag, metadata
from tokenspeed_core.plugins.kinds import GROUP_PREFIX, kind_of

pytestmark = pytest.mark.tree

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text(encoding="utf-8")
CELLS = [row.strip("|").rpartition(" | ")[2] for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)]
NAMES = sorted({name for cell in CELLS for name in re.findall(r"`([^`]+)`", cell)})
OTHER_NAMES = {  # neither in the API nor on the command line
    "[api1]",
    "tokenspeed-core",
    "TOKENSPEED_PLUGINS",
    "tokenspeed_models.layers",
    "vendor/name",
    "graph_safe",
    "sinks",
    "soft_cap",
    "[B, block_size, K, D]",
    "stride(0)",
    "block_size * K * D",
    "token_ids",
    "positions",
    "wanted",
}
VENDOR_KERNEL = """
import torch
from torch.nn import functional

def attend_varlen(q, k_cache, v_cache, out, *, cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k,
                  softmax_scale, window):
    block_size, starts = k_cache.shape[1], cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()[: len(starts) - 1]):
        tokens = slice(starts[row], starts[row + 1])
        if not length or tokens.start == tokens.stop:
            out[tokens] = 0
            continue
        blocks = block_table[row, : -(-length // block_size)]
        k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        key = torch.arange(length)
        query = key[length - (tokens.stop - tokens.start) :].unsqueeze(1)
        seen = (key <= query) & (True if window is None else key > query - window)
        out[tokens] = functional.scaled_dot_product_attention(
            q[tokens].transpose(0, 1), k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
"""


def exists(name: str) -> bool:
    """Whether the API or the command line has a name."""
    if name.startswith("--"):
        setting, _, key = name[2:].replace("-", "_").partition(".")
        return flag(setting) in {flag(each) for each in Config.model_fields} and (
            not key or key in metadata(setting)["narrow"]
        )
    if name.startswith("tokenspeed plugins "):
        return name.split()[2] in SUBCOMMANDS
    if name.startswith(GROUP_PREFIX):
        return kind_of(name.removeprefix(GROUP_PREFIX)) is not None
    first, _, member = name.partition(".")
    found = getattr(api, first, None)
    fields = (
        {field.name for field in dataclasses.fields(found)}
        if dataclasses.is_dataclass(found)
        else set()
    )
    return found is not None and (not member or member in fields or hasattr(found, member))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_the_guide_exists(name: str) -> None:
    assert name in OTHER_NAMES or exists(name)


def test_guide_names_most_attention_fields() -> None:
    fields = {
        f"{each.__name__}.{field.name}"
        for each in (api.AttentionStep, api.AttentionLimits, api.Capability)
        for field in dataclasses.fields(each)
    }
    assert fields - set(NAMES) <= {"Capability.platforms", "Capability.phases", "Capability.limits"}


def test_example_passes_the_conformance_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, kernel = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "acme_ported").mkdir()
    (tmp_path / "acme_ported" / "__init__.py").write_text(descriptor)
    (tmp_path / "acme_ported" / "kernel.py").write_text(kernel)
    (tmp_path / "your_kernels.py").write_text(textwrap.dedent(VENDOR_KERNEL))
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_ported

    suite = type("Ported", (KernelConformance,), {"spec": acme_ported.PORTED})()
    suite.test_agrees_with_reference()
    suite.test_declared_cases_run()
    suite.test_values_beyond_limits_are_refused()
    for name in ("acme_ported", "acme_ported.kernel", "your_kernels"):
        del sys.modules[name]
