"""Quantization methods of other distributions read checkpoints that ours do not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenspeed_core.api import LayerSchemes, Quantization, QuantizationScheme
from tokenspeed_core.checkpoint.quantization import ResolvedQuantization, find_quantization
from tokenspeed_core.errors import CheckpointError, ConfigError, PluginError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status

SCHEME = QuantizationScheme("acme int2", "uint8", None, "acme_linear")
ACME = {"quant_method": "acme", "bits": 2}


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Read the settings of a made-up method."""
    if settings.get("quant_method") != "acme":
        return None
    if settings["bits"] != 2:
        raise ValueError(f"bits is {settings['bits']}. Supported: 2.")
    return lambda layer: None if layer == "lm_head" else SCHEME


def read_awq(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Read AWQ checkpoints too."""
    return (lambda layer: SCHEME) if settings.get("quant_method") == "awq" else None


def entry(name: str) -> Entry:
    return Entry(
        "quantization", name, f"acme:{name}", 1, "acme", "1.0", "", Status.OK, "", "installed", ""
    )


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    module: Any = ModuleType("acme")
    module.acme = Quantization("acme", f"{__name__}:read")
    module.aaa = Quantization("aaa", f"{__name__}:read_awq")
    monkeypatch.setitem(sys.modules, "acme", module)
    return Catalog([*Catalog.discover().entries("quantization"), entry("acme"), entry("aaa")])


def find(
    catalog: Catalog, config: Mapping[str, Any], name: str | None = None
) -> ResolvedQuantization | None:
    checkpoint: Any = SimpleNamespace(name="tiny", path="tiny", config=config)
    return find_quantization(name, checkpoint, catalog)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": ACME},
        {"compression_config": ACME},
        {"text_config": {"quantization_config": ACME}},
    ],
)
def test_plugin_reads_its_own_form(catalog: Catalog, config: Mapping[str, Any]) -> None:
    found = find(catalog, config)
    assert found is not None
    assert found.name == "acme"
    assert found.scheme_of("model.layers.0.mlp.up_proj") == SCHEME
    assert found.scheme_of("lm_head") is None


def test_unquantized_checkpoint_has_no_method(catalog: Catalog) -> None:
    assert find(catalog, {}) is None
    assert find(catalog, {"quantization_config": {}}) is None
    with pytest.raises(ConfigError, match="--quantization acme needs a quantized checkpoint"):
        find(catalog, {}, "acme")
    with pytest.raises(PluginError, match="acmé"):
        find(catalog, {}, "acmé")


def test_refused_form_is_named_in_the_error(catalog: Catalog) -> None:
    with pytest.raises(CheckpointError, match=r"not supported: acme: bits is 3\. Supported: 2\."):
        find(catalog, {"quantization_config": {**ACME, "bits": 3}})
    with pytest.raises(CheckpointError, match=r"installed: aaa, acme, .*awq"):
        find(catalog, {"quantization_config": {"quant_method": "other"}})


def test_method_called_like_quant_method_comes_first(catalog: Catalog) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    found = find(catalog, {"quantization_config": awq})
    assert found is not None
    assert found.name == "awq"
    named = find(catalog, {"quantization_config": awq}, "aaa")
    assert named is not None
    assert named.scheme_of("model.layers.0.mlp.up_proj") == SCHEME
    with pytest.raises(ConfigError, match="already quantized as awq"):
        find(catalog, {"quantization_config": awq}, "fp8")


def test_broken_reader_is_named(catalog: Catalog) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"acme: the settings are incomplete or malformed \(KeyError: 'bits'\)",
    ):
        find(catalog, {"quantization_config": {"quant_method": "acme"}})


def test_user_may_name_per_channel_methods_for_compressed_tensors() -> None:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    found = find(Catalog.discover(), {"quantization_config": settings}, "w8a8_int8")
    assert found is not None
    assert found.name == "w8a8_int8"
    with pytest.raises(ConfigError, match="already quantized as compressed-tensors"):
        find(Catalog.discover(), {"quantization_config": settings}, "w8a8_fp8")
