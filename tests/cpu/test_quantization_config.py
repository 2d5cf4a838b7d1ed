"""Reading `quantization_config`: the method of a checkpoint, and the modules it ignores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from block_scaled import FORMATS, MODELOPT, compressed_config
from fine_grained import STORED as FINE_GRAINED
from quantized_build import PER_CHANNEL, read_schemes

from tokenspeed_core.errors import CheckpointError

LAYER = "model.layers.0.mlp.up_proj"


def check_refused(settings: dict[str, Any], found: str = "") -> None:
    """Check that the error shows the value that was found."""
    with pytest.raises(CheckpointError, match=f"quantization_config is not supported.*{found}"):
        read_schemes(settings)


def read(settings: dict[str, Any]) -> tuple[str, str]:
    """Return the names of the method and of the scheme of a layer."""
    method, scheme_of = read_schemes(settings)
    scheme = scheme_of(LAYER)
    assert scheme is not None
    return method, scheme.name


def unquantized(settings: dict[str, Any], layers: Sequence[str]) -> list[str]:
    """Return the layers without a scheme."""
    _, scheme_of = read_schemes(settings)
    return [layer for layer in layers if scheme_of(layer) is None]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ignore": []},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        {
            "ignore": [
                "lm_head",
                "model.layers.0.mlp.gate",
                "re:.*mlp.gate$",
                "model.embed_tokens",
                "*.mlp.gate.*",
            ]
        },
    ],
)
def test_mxfp8_and_nvfp4_of_both_writers_are_read(form: str, changes: dict[str, Any]) -> None:
    older_modelopt = {**MODELOPT[form], "quant_method": "modelopt_fp4"}
    for config in (compressed_config(form), MODELOPT[form], older_modelopt):
        assert read({**config, **changes}) == (form, form)


@pytest.mark.parametrize(
    "changes",
    [
        {"quant_algo": "NVFP4_AWQ", "format": "pack-quantized"},
        {"transform_config": {"config_groups": {"R1": {}}}, "quant_algo": "W4A16_NVFP4"},
        {"kv_cache_scheme": {"num_bits": 4, "type": "float", "dynamic": False}},
        {"quant_method": "other"},
        {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"group_size": 64},
                    "input_activations": None,
                }
            }
        },
        {"config_groups": {"a": {"targets": ["Linear"]}, "b": {"targets": ["Embedding"]}}},
        {
            "config_groups": {
                "a": {
                    **compressed_config("nvfp4")["config_groups"]["group_0"],
                    "targets": ["Embedding"],
                }
            }
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMATS)
def test_unsupported_mxfp8_and_nvfp4_are_refused(form: str, changes: dict[str, Any]) -> None:
    for config in (compressed_config(form), MODELOPT[form]):
        check_refused({**config, **changes})


def test_fp8_with_a_quantized_head_is_refused() -> None:
    assert read(PER_CHANNEL) == ("compressed-tensors", "fp8")
    check_refused({**PER_CHANNEL, "ignore": ["re:.*mlp.gate$"]}, "lm_head")


def test_head_inside_a_language_model_is_unquantized() -> None:
    settings = {**PER_CHANNEL, "ignore": ["language_model.lm_head", "re:.*mlp.gate$"]}
    assert read(settings) == ("compressed-tensors", "fp8")


def test_settings_that_are_not_an_object_are_refused() -> None:
    with pytest.raises(CheckpointError, match="quantization_config is 'fp8', expected an object"):
        read_schemes("fp8")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "modules_to_not_convert": [
                "lm_head",
                "model.embed_tokens",
                "model.norm",
                "model.layers.0.self_attn.q_norm",
            ]
        },
        {"modules_to_not_convert": None, "scale_fmt": "float"},
        {"ignored_layers": ["lm_head"]},
        {"scale_fmt": "ue8m0"},
    ],
)
def test_fine_grained_fp8_is_read(changes: dict[str, Any]) -> None:
    assert read({**FINE_GRAINED, **changes}) == ("fp8", "fp8-block")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_block_size": [64, 128]},
        {"activation_scheme": "static"},
        {"scale_fmt": "int"},
        {"modules_to_convert": ["embed_tokens"]},
        {"quant_method": "quark"},
        {"fmt": "e5m2"},
    ],
)
def test_unsupported_fine_grained_fp8_is_refused(changes: dict[str, Any]) -> None:
    check_refused({**FINE_GRAINED, **changes})


def test_wrong_block_size_is_explained_once() -> None:
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[64, 128\]") as caught:
        read_schemes({**FINE_GRAINED, "weight_block_size": [64, 128]})
    message = str(caught.value)
    assert message.count("weight_block_size is") == 1
    assert "fp8-block" not in message
    assert ".." not in message


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("model.layers.1", ["model.layers.1.mlp.up_proj"]),
        ("model.layers.1.mlp.gate", []),
        ("lm_head", []),
        ("*.mlp.*", ["model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        ("re:up_proj", []),
        ("model.layers.1*", ["model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"]),
        (r"re:.*layers\.1\d\.", ["model.layers.10.mlp.up_proj"]),
    ],
)
def test_ignored_modules_match_like_the_writers(pattern: str, matched: list[str]) -> None:
    names = [
        "model.layers.1.mlp.up_proj",
        "model.layers.10.mlp.up_proj",
        "model.layers.2.self_attn.q_proj",
    ]
    others = [name for name in names if name not in matched]
    ignored = {**MODELOPT["mxfp8"], "ignore": [pattern]}
    assert unquantized(ignored, names) == matched
    nested = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}}
    nested["quantization"]["exclude_modules"] = [pattern]
    assert unquantized(nested, names) == matched
    (group,) = PER_CHANNEL["config_groups"].values()
    groups = {"config_groups": {"group_0": {**group, "targets": [pattern]}}}
    assert unquantized({**PER_CHANNEL, **groups}, names) == others


def test_patterns_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = re.compile
    monkeypatch.setattr(
        re, "compile", lambda pattern, flags=0: compiled.append(pattern) or real(pattern, flags)
    )
    # more than the cache of `re` holds
    patterns = [rf"re:once\.{layer}\." for layer in range(600)]
    _, scheme_of = read_schemes({**MODELOPT["mxfp8"], "ignore": patterns})
    for layer in range(3):
        scheme_of(f"once.{layer}.mlp.up_proj")
    assert sum("once" in pattern for pattern in compiled) == len(patterns)


def test_invalid_regular_expression_is_named() -> None:
    check_refused({**MODELOPT["mxfp8"], "ignore": ["re:("]}, r"'re:\('")
