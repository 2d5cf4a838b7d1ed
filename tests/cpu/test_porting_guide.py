"""The porting guide: its names exist and its example passes the conformance kit."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from tokenspeed_plugin_tools.command import SUBCOMMANDS
from tokenspeed_server.settings import ServerConfig
from tokenspeed_testing.kernel import KernelConformance

from tokenspeed_core import api
from tokenspeed_core.config.settings import flag
from tokenspeed_core.plugins.kinds import GROUP_PREFIX, kind_of
from tokenspeed_models import layers, rope_config
from tokenspeed_models.testing import DenseBuild, sequence_logits

pytestmark = pytest.mark.tree

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text(encoding="utf-8")
CELLS = [row.strip("|").rpartition(" | ")[2] for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)]
NAMES = sorted({name for cell in CELLS for name in re.findall(r"`([^`]+)`", cell)})
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
OTHER_NAMES = {  # neither in the API nor on the command line
    "[api1]",
    "tokenspeed-core",
    "quantization_config",
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
        return flag(setting) in {flag(each) for each in ServerConfig.model_fields} and (
            not key or key in ServerConfig.metadata(setting)["narrow"]
        )
    if name.startswith("tokenspeed plugins "):
        return name.split()[2] in SUBCOMMANDS
    if name.startswith(GROUP_PREFIX):
        return kind_of(name.removeprefix(GROUP_PREFIX)) is not None
    call = re.fullmatch(r"(\w+)\((\w+)=.+\)", name)  # a layer and one of its arguments
    if call is not None:
        return call[2] in inspect.signature(getattr(layers, call[1])).parameters
    if hasattr(layers, name) or hasattr(rope_config, name):
        return True
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
    assert fields - set(NAMES) <= {
        "AttentionLimits.max_drafts",
        "Capability.limits",
        "Capability.phases",
        "Capability.platforms",
    }


def test_example_passes_the_conformance_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, kernel, *_ = EXAMPLES
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


def test_example_family_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, describe, model = EXAMPLES
    (tmp_path / "acme_olmo2").mkdir()
    (tmp_path / "acme_olmo2" / "describe.py").write_text(describe)
    (tmp_path / "acme_olmo2" / "model.py").write_text(model)
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_olmo2.describe
    import acme_olmo2.model

    sizes = {"hidden_size": 48, "intermediate_size": 56, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.Olmo2Config(
        **sizes, **heads, initializer_range=0.3, pad_token_id=None, max_position_embeddings=64
    )
    torch.manual_seed(5)
    reference = transformers.Olmo2ForCausalLM(config).eval()
    info = acme_olmo2.describe.describe(config.to_dict())
    assert info.num_parameters == sum(each.numel() for each in reference.parameters())
    build = DenseBuild()
    family = acme_olmo2.model.Olmo2ForCausalLM(config.to_dict(), build)
    family.load_weights(reference.state_dict().items())
    ids = list(range(3, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
        found = sequence_logits(family, build, ids, chunk=7)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for name in ("acme_olmo2", "acme_olmo2.describe", "acme_olmo2.model"):
        del sys.modules[name]
