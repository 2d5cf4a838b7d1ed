"""AWQ, GPTQ, compressed-tensors, INT8 and per-tensor FP8 checkpoints, against transformers with the weights they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from integer_checkpoints import (
    GROUP,
    SIZES,
    Quantizer,
    Stored,
    awq,
    compressed,
    compressed_ordered,
    compressed_scheme,
    fp8_per_tensor,
    gptq,
    store,
)
from quantized_build import (
    SPECS,
    TOKENS,
    logprob_errors,
    read_schemes,
    relative,
    transformers_logits,
)
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_server.dry_run import dry_run
from torch import Tensor, nn

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_kernels.reference.w4a16 import dequantize_int4, pack_int4, unpack_int4
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits

AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_awq",
    "block_name_to_quantize": "model.layers",
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
PER_TOKEN = {"strategy": "token", "dynamic": True}


def by_compressed_tensors(
    form: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    *,
    input_scale: float | None = None,
) -> tuple[dict[str, Any], Quantizer]:
    """Return the settings that llm-compressor writes, and a function that quantizes a weight."""
    scheme = compressed_scheme(weights, inputs)
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }

    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = compressed(weight, scheme, form)
        if input_scale is not None:
            stored["input_scale"] = torch.tensor([input_scale])
        return stored, meant

    return settings, quantize


WEIGHT_ONLY: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq asymmetric": ({**GPTQ, "sym": False}, partial(gptq, symmetric=False)),
    "gptq desc_act": (
        {**GPTQ, "sym": False, "desc_act": True},
        partial(gptq, symmetric=False, ordered=True),
    ),
    "AutoRound": ({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, gptq),
    "gptq_v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        partial(gptq, symmetric=False, offset=0),
    ),
    "gptq per channel": (
        {**GPTQ, "group_size": -1, "desc_act": True},
        partial(gptq, group_size=96),
    ),
    "W4A16": by_compressed_tensors("pack-quantized", INT4),
    "W4A16 asymmetric": by_compressed_tensors("pack-quantized", {**INT4, "symmetric": False}),
    "W4A16 per channel": by_compressed_tensors(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}
    ),
    "MXFP4A16": by_compressed_tensors(
        "mxfp4-pack-quantized",
        preset_name_to_scheme("MXFP4A16", ["Linear"]).weights.model_dump(),
    ),
    "W4A16 actorder": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "g": {"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}
            },
        },
        compressed_ordered,
    ),
}


class SchemeBuild(DenseBuild):
    """A build with a checkpoint's schemes, and the reference kernels of their ops."""

    def __init__(self, schemes: LayerSchemes) -> None:
        super().__init__()
        self._schemes, self._ops = schemes, installed_ops(Catalog.discover())

    def scheme(self, layer: str) -> QuantizationScheme | None:
        return self._schemes(layer)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        try:
            return super().op(op, **problem)
        except KeyError:
            kernel: Callable[..., Any] = load_target(self._ops[op].reference)(problem)
            return kernel


def logits(folder: Path, settings: dict[str, Any], family: str = "Llama") -> Tensor:
    """Return the logits [T, vocab] of a checkpoint with the kernels that its schemes name."""
    build = SchemeBuild(read_schemes(settings)[1])
    config = json.loads((folder / "config.json").read_text())
    model = load_target(SPECS[family].load)(config, build)
    model.load_weights(read_safetensors(str(folder), model, lambda done, total: None))
    return sequence_logits(model, build, TOKENS)


def test_packing_is_reversible() -> None:
    codes = torch.randint(0, 16, (3, 5, 96), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (3, 5, 48)
    assert torch.equal(unpack_int4(packed), codes)
    assert int(packed[0, 0, 3]) == int(codes[0, 0, 3]) + 16 * int(codes[0, 0, 19])
    ones = dequantize_int4(pack_int4(torch.full((1, 64), 9)), torch.tensor([[2.0, 3.0]]), None)
    assert ones[0, [0, 63]].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("form", WEIGHT_ONLY)
def test_weight_only_logits_equal_transformers(form: str, tmp_path: Path) -> None:
    settings, quantize = WEIGHT_ONLY[form]
    reference = save_reference("Llama", tmp_path, **SIZES)
    original = transformers_logits(reference)
    store(tmp_path, reference, settings, quantize)
    expected = transformers_logits(reference)
    assert relative(original, expected) > 0.01
    torch.testing.assert_close(logits(tmp_path, settings), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["awq", "gptq desc_act", "W4A16"])
def test_experts_have_four_bit_weights(form: str, tmp_path: Path) -> None:
    settings, quantize = WEIGHT_ONLY[form]
    sizes = {"num_experts": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **sizes})
    store(tmp_path, reference, settings, quantize)
    expected = transformers_logits(reference)
    found = logits(tmp_path, settings, "Qwen3Moe")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_have_per_tensor_fp8_weights(tmp_path: Path) -> None:
    settings, quantize, _ = QUANTIZED_INPUTS["FP8 dynamic"]
    sizes = {"num_experts": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **sizes})
    store(tmp_path, reference, settings, quantize)
    # Only the activations differ.
    found = logits(tmp_path, settings, "Qwen3Moe")
    assert 1e-3 < relative(found, transformers_logits(reference)) < 0.15


def quantize_inputs(model: nn.Module, round_values: Callable[[Tensor], Tensor]) -> None:
    """Make a model quantize the inputs of all linear layers but the head."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda module, inputs: round_values(inputs[0]))


def int8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def fp8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fixed(scale: float, form: str) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds to int8 or e4m3 values with one scale."""
    if form == "int8":
        return lambda x: (x / scale).round().clamp(-128, 127) * scale
    return lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


STATIC = {"strategy": "tensor", "dynamic": False}
QUANTIZED_INPUTS = {
    "W8A8": (*by_compressed_tensors("int-quantized", INT8, {**INT8, **PER_TOKEN}), int8_rows),
    "W8A8 static": (
        *by_compressed_tensors("int-quantized", INT8, {**INT8, **STATIC}, input_scale=0.03),
        fixed(0.03, "int8"),
    ),
    "FP8 static": (
        *by_compressed_tensors("float-quantized", FP8, {**FP8, **STATIC}, input_scale=0.01),
        fixed(0.01, "fp8"),
    ),
    "FP8 dynamic": (
        *by_compressed_tensors("float-quantized", FP8, {**FP8, "dynamic": True}),
        fp8_rows,
    ),
    "AutoFP8": (AUTO_FP8, partial(fp8_per_tensor, input_name="input_scale"), fixed(0.01, "fp8")),
    "transformers FP8": (
        {**AUTO_FP8, "weight_block_size": None},
        partial(fp8_per_tensor, scale_name="weight_scale_inv", input_name="activation_scale"),
        fixed(0.01, "fp8"),
    ),
    "ModelOpt FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        partial(fp8_per_tensor, input_name="input_scale"),
        fixed(0.01, "fp8"),
    ),
}


@pytest.mark.parametrize("form", QUANTIZED_INPUTS)
def test_logits_with_quantized_inputs_equal_transformers(form: str, tmp_path: Path) -> None:
    settings, quantize, round_values = QUANTIZED_INPUTS[form]
    reference = save_reference("Llama", tmp_path, **SIZES)
    store(tmp_path, reference, settings, quantize)
    dequantized = transformers_logits(reference)
    quantize_inputs(reference, round_values)
    expected = transformers_logits(reference)
    found = logits(tmp_path, settings)
    assert relative(expected, dequantized) > 1e-3
    # A value halfway between two codes may be rounded in either direction, and later values depend on it.
    assert min(relative(*rows) for rows in zip(found, expected, strict=True)) < 1e-4
    assert relative(found, expected) < 0.3 * relative(expected, dequantized)


def test_block_wise_fp8_of_compressed_tensors_is_read(tmp_path: Path) -> None:
    weights = {**FP8, "strategy": "block", "block_structure": [128, 128]}
    inputs = {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}
    settings, quantize = by_compressed_tensors("float-quantized", weights, inputs)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    reference = save_reference("Llama", tmp_path, **{**SIZES, **sizes})
    store(tmp_path, reference, settings, quantize)
    _, scheme_of = read_schemes(settings)
    scheme = scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert (scheme.linear, scheme.scale_name) == ("linear_fp8_block", "weight_scale")
    assert 1e-3 < relative(logits(tmp_path, settings), transformers_logits(reference)) < 0.2


@pytest.mark.parametrize(
    ("form", "planned"),
    [
        ("awq", "int4, group 32, zero points"),
        ("gptq desc_act", "activation order"),
        ("W8A8", "int8"),
    ],
)
def test_engine_serves_and_shows_the_scheme(form: str, planned: str, tmp_path: Path) -> None:
    settings, quantize, *_ = {**WEIGHT_ONLY, **QUANTIZED_INPUTS}[form]
    reference = save_reference("Llama", tmp_path, **SIZES)
    store(tmp_path, reference, settings, quantize)
    options: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    report = dry_run(Config.from_keywords(model=str(tmp_path), **options))
    assert f"quantization {settings['quant_method']}" in report
    assert re.search(rf"model.layers.\*.self_attn.q_proj: .*{planned}.* \(2 of them\)", report)
    with LLM(str(tmp_path), max_total_tokens=256, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
    expected = transformers_logits(reference, TOKENS + list(answer.token_ids))[len(TOKENS) - 1 : -1]
    assert answer.logprobs is not None
    assert logprob_errors(answer.logprobs, expected).max() < (1e-3 if form != "W8A8" else 0.1)
    with LLM(str(tmp_path), max_total_tokens=256, load_format="dummy", **options) as llm:
        llm.generate([{"prompt_token_ids": TOKENS}], SamplingParams(max_tokens=2))


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("awq", lambda t: t.pop(f"{NAME}.scales"), f"missing: {NAME}.scales"),
        ("W4A16", lambda t: t.pop(f"{NAME}.weight_scale"), f"missing: {NAME}.weight_scale"),
        ("FP8 static", lambda t: t.pop(f"{NAME}.input_scale"), f"missing: {NAME}.input_scale"),
        (
            "gptq",
            lambda t: t.update({f"{NAME}.qzeros": t[f"{NAME}.qzeros"] + 1}),
            f"{NAME}: qzeros has zero points other than 8",
        ),
        (
            "gptq",
            lambda t: t.update({f"{NAME}.scales": t[f"{NAME}.scales"][:2]}),
            rf"{NAME}.scales has shape \[2, 64\], expected \[3, 64\]",
        ),
        (
            "gptq desc_act",
            lambda t: t.update({f"{NAME}.g_idx": t[f"{NAME}.g_idx"] // 2}),
            f"{NAME}: g_idx does not give each of 3 groups the same number",
        ),
        (
            "gptq desc_act",
            lambda t: t["model.layers.0.self_attn.k_proj.g_idx"].copy_(torch.arange(64) // 32),
            "model.layers.0.self_attn.[qkv]_proj: order differs",
        ),
        (
            "awq",
            lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"][:, :4].contiguous()}),
            rf"{NAME}.qweight has shape \[96, 4\], expected \[96, 8\]",
        ),
        (
            "W4A16",
            lambda t: t.update({f"{NAME}.weight_packed": t[f"{NAME}.weight_packed"].short()}),
            f"{NAME}.weight_packed is torch.int16, expected torch.int32",
        ),
        (
            "W8A8",
            lambda t: t[f"{NAME}.weight_scale"].zero_(),
            f"{NAME}: weight_scale has values that are not positive",
        ),
    ],
    ids=lambda each: "" if callable(each) else None,  # an address differs between processes
)
def test_bad_checkpoint_is_named(
    form: str, change: Callable[[Stored], Any], message: str, tmp_path: Path
) -> None:
    settings, quantize, *_ = {**WEIGHT_ONLY, **QUANTIZED_INPUTS}[form]
    store(tmp_path, save_reference("Llama", tmp_path, **SIZES), settings, quantize)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)


def compressed_settings(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({**AWQ, "bits": 3}, "bits is 3"),
        ({**AWQ, "version": "gemv"}, "'gemv'"),
        ({**AWQ, "group_size": 16}, "group_size is 16"),
        ({**GPTQ, "bits": 8}, "bits is 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
        ({**GPTQ, "lm_head": True}, "lm_head is quantized"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, r"invalid regular expression '\('"),
        (compressed_settings({**INT4, "num_bits": 8}, None), "8-bit int per-group group_size 32"),
        (compressed_settings(INT4, {**INT8, **PER_TOKEN}), "8-bit int per-token dynamic"),
        ({**AUTO_ROUND, "packing_format": "auto_round:exllamav2"}, "'auto_round:exllamav2'"),
        ({**AUTO_FP8, "weight_block_size": [64, 64]}, r"\[64, 64\] with static"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "installed: .*awq, compressed"),
    ],
    ids=str,
)
def test_unsupported_scheme_is_refused_by_name(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        read_schemes(settings)


def test_layers_have_their_own_schemes() -> None:
    layers = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate")
    int4, fp8 = (
        {"targets": [targets], "weights": weights}
        for targets, weights in (
            ("Linear", INT4),
            (r"re:.*down_proj$", {**FP8, "strategy": "channel"}),
        )
    )
    fp8["input_activations"] = {**FP8, **PER_TOKEN}
    mixed = {**compressed_settings(INT4, None), "config_groups": {"a": int4, "b": fp8}}
    mixed["ignore"] = ["lm_head", "re:.*mlp.gate$"]
    dynamic = {**GPTQ, "dynamic": {r"-:.*mlp\.gate$": {}, r"+:.*down_proj": {"group_size": 64}}}
    expected = {
        "compressed-tensors": (mixed, ["int4, group 32", "int4, group 32", "fp8", None]),
        "gptq": (dynamic, ["int4, group 32", "int4, group 32", "int4, group 64", None]),
        "auto-round": (
            {**AUTO_ROUND, "extra_config": {".*self_attn.*": {"bits": 16}, ".*gate": {"bits": 16}}},
            [None, *["int4, group 32, zero points"] * 2, None],
        ),
        "awq": (
            {**AWQ, "modules_to_not_convert": ["self_attn", "gate"]},
            [None, *["int4, group 32, zero points"] * 2, None],
        ),
    }
    for method, (settings, names) in expected.items():
        found, scheme_of = read_schemes(settings)
        schemes = [scheme_of(f"model.layers.3.{layer}") for layer in layers]
        assert found == method
        assert [None if each is None else each.name for each in schemes] == names
