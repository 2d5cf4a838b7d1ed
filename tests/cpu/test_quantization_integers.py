"""AWQ, GPTQ, compressed-tensors, INT8 and per-tensor FP8 checkpoints, against transformers with the weights they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import SIZES, Stored, store
from quantized_build import (
    SPECS,
    TOKENS,
    logprob_errors,
    read_schemes,
    relative,
    transformers_logits,
)
from quantized_forms import (
    AUTO_FP8,
    AUTO_ROUND,
    AWQ,
    FP8,
    GPTQ,
    INT4,
    INT8,
    PER_TOKEN,
    QUANTIZED_INPUTS,
    WEIGHT_ONLY,
    SchemeBuild,
    by_compressed_tensors,
    fixed,
    int8_rows,
    logits,
    quantize_inputs,
)
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_server.dry_run import dry_run
from tokenspeed_server.settings import ServerConfig
from torch import Tensor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import CheckpointError
from tokenspeed_kernels import integer_inputs
from tokenspeed_kernels.reference import moe_w8a8
from tokenspeed_kernels.reference.w4a16 import dequantize_int4, pack_int4, unpack_int4
from tokenspeed_models.layers import Experts, Linear, Projection
from tokenspeed_models.weights import WeightMap


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


def test_biases_of_zeros_are_ignored(tmp_path: Path) -> None:
    settings, quantize = WEIGHT_ONLY["gptq"]

    def with_bias(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = quantize(weight)
        return {**stored, "bias": torch.zeros(len(weight), dtype=torch.float16)}, meant

    reference = save_reference("Llama", tmp_path, **SIZES)
    store(tmp_path, reference, settings, with_bias)
    expected = transformers_logits(reference)
    torch.testing.assert_close(logits(tmp_path, settings), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["awq", "gptq desc_act", "W4A16", "MXFP4A16"])
def test_experts_have_four_bit_weights(form: str, tmp_path: Path) -> None:
    settings, quantize = WEIGHT_ONLY[form]
    sizes = {"num_experts": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **sizes})
    store(tmp_path, reference, settings, quantize)
    expected = transformers_logits(reference)
    found = logits(tmp_path, settings, SPECS["Qwen3Moe"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


MOE = {"num_experts": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize("form", ["FP8 dynamic", "FP8 static", "AutoFP8", "W8A8", "W8A8 static"])
def test_experts_have_8_bit_weights(form: str, tmp_path: Path) -> None:
    settings, quantize, _ = QUANTIZED_INPUTS[form]
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **MOE})
    store(tmp_path, reference, settings, quantize)
    # Only the activations differ.
    found = logits(tmp_path, settings, SPECS["Qwen3Moe"])
    assert 1e-3 < relative(found, transformers_logits(reference)) < 0.15


def test_experts_share_the_largest_input_scale() -> None:
    schemes = read_schemes(QUANTIZED_INPUTS["W8A8 static"][0])[1]
    sizes = {"num_experts": 2, "top_k": 1, "hidden_size": 32, "intermediate_size": 16}
    build = SchemeBuild(schemes)
    experts = Experts(build, **sizes)
    slots = list(experts.slots(""))
    WeightMap(slots).load(
        (slot.name, torch.full_like(slot.target, 1.0 if "1.up_proj" in slot.name else 0.5))
        for slot in slots
    )
    gate_up_input, _, _, down_input, *_ = experts._operands
    assert (gate_up_input.tolist(), down_input.tolist()) == ([1.0], [0.5])


def test_projections_share_the_largest_input_scale() -> None:
    build = SchemeBuild(read_schemes(QUANTIZED_INPUTS["W8A8 static"][0])[1])
    projections = tuple(Projection(name, 8, None) for name in ("a", "b", "c"))
    linear = Linear(build, 32, projections)
    slots = list(linear.slots(""))
    scales = {"a.input_scale": 0.5, "b.input_scale": 2.0, "c.input_scale": 1.0}
    WeightMap(slots).load(
        (slot.name, torch.full_like(slot.target, scales.get(slot.name, 1))) for slot in slots
    )
    assert linear._input_operands[0].tolist() == [2.0]


@pytest.mark.parametrize("op", ["fp8_static", "int8", "int8_static"])
def test_8_bit_experts_multiply_the_stored_values(op: str) -> None:
    problem = {"num_experts": 4, "top_k": 2, "hidden_size": 48, "intermediate_size": 40}
    problem["dtype"] = "float32"
    seed = torch.Generator().manual_seed(1)
    make = getattr(integer_inputs, f"moe_experts_{op}")
    given = make(problem, 7, torch.device("cpu"), seed, strided=True)
    found = getattr(moe_w8a8, f"moe_experts_{op}")(problem)(*given.values())
    kind, _, is_static = op.partition("_")
    gate_up, down = (
        given[name].double() * given[f"{name}_scale"].double() for name in ("gate_up", "down")
    )

    def rounded(x: Tensor, name: str) -> Tensor:
        if is_static:
            return fixed(float(given[f"{name}_input"]), kind)(x.float()).double()
        return int8_rows(x.float()).double()

    for token, x in enumerate(given["x"]):
        total = torch.zeros(48).double()
        routes = zip(given["ids"][token].tolist(), given["weights"][token].tolist(), strict=True)
        for expert, weight in routes:
            if expert == len(gate_up):  # no expert
                continue
            gate, up = (gate_up[expert] @ rounded(x, "gate_up")).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            total += weight * (down[expert] @ rounded(hidden, "down"))
        torch.testing.assert_close(found[token].double(), total, rtol=1e-3, atol=1e-3)


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
    report = dry_run(ServerConfig.from_keywords(model=str(tmp_path), **options))
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
GROUPS = f"{NAME}.g_idx"


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
            f"{NAME}: g_idx does not assign the same number of columns to each of 3 groups",
        ),
        (
            "gptq desc_act",
            lambda t: t["model.layers.0.self_attn.k_proj.g_idx"].copy_(torch.arange(64) // 32),
            "model.layers.0.self_attn.[qkv]_proj: order differs",
        ),
        (
            "gptq desc_act",
            lambda t: t.update({GROUPS: t[GROUPS] + 1}),
            f"{NAME}: g_idx does not assign the same number of columns",
        ),
        (
            "gptq",
            lambda t: t.update({GROUPS: t[GROUPS].flip(0)}),
            f"{GROUPS}: the input features are not in the order of their groups",
        ),
        (
            "gptq",
            lambda t: t.update({f"{NAME}.bias": torch.arange(64.0)}),
            f"unexpected: {NAME}.bias",
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
