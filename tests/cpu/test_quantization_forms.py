"""What a checkpoint says of its quantisation: which method reads it, which linear maps it keeps whole."""

from __future__ import annotations

import re
from typing import Any

import pytest
from block_scaled import FORMATS, MODELOPT, compressed_config

from tokenspeed_models.quantization_config import ignored_modules, read_quantization


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
def test_both_writers_forms_are_read_by_their_method(form: str, changes: dict[str, Any]) -> None:
    for config in (
        compressed_config(form),
        MODELOPT[form],
        {**MODELOPT[form], "quant_method": "modelopt_fp4"},
    ):
        assert read_quantization({"quantization_config": {**config, **changes}}) == form


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
def test_forms_with_other_parts_are_refused_with_those_that_are_served(
    form: str, changes: dict[str, Any]
) -> None:
    for config in (compressed_config(form), MODELOPT[form]):
        with pytest.raises(
            ValueError, match=r"quantization_config is .*: served are .*MXFP8 .*NVFP4"
        ):
            read_quantization({"quantization_config": {**config, **changes}})


@pytest.mark.parametrize(
    ("pattern", "kept"),
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
def test_a_name_is_matched_as_its_writer_does(pattern: str, kept: list[str]) -> None:
    names = [
        "model.layers.1.mlp.up_proj",
        "model.layers.10.mlp.up_proj",
        "model.layers.2.self_attn.q_proj",
    ]
    for said in ({"ignore": [pattern]}, {"quantization": {"exclude_modules": [pattern]}}):
        assert ignored_modules({"quantization_config": said}, names) == kept
    group = {"config_groups": {"group_0": {"targets": [pattern]}}}
    assert ignored_modules({"quantization_config": group}, names) == [
        name for name in names if name not in kept
    ]
    assert ignored_modules({}, names) == []


def test_patterns_are_compiled_once_however_many_parts_are_compared_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    real = re.compile
    monkeypatch.setattr(
        re, "compile", lambda pattern, flags=0: compiled.append(pattern) or real(pattern, flags)
    )
    patterns = [
        rf"re:once\.{layer}\." for layer in range(600)
    ]  # more than the module `re` remembers by itself
    for layer in range(3):
        ignored_modules(
            {"quantization_config": {"ignore": patterns}}, [f"once.{layer}.mlp.up_proj"]
        )
    assert sum("once" in pattern for pattern in compiled) == len(patterns)


def test_an_expression_that_is_none_is_said() -> None:
    with pytest.raises(ValueError, match=r"has 're:\(', no regular expression: missing \)"):
        ignored_modules({"quantization_config": {"ignore": ["re:("]}}, [])
