"""MXFP8 and NVFP4 checkpoints, compared with compressed-tensors: layers, models and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_scaled import (
    FORMATS,
    MODELOPT,
    SIZES,
    by_modelopt,
    compressed,
    compressed_config,
    decompressed,
    store,
)
from quantized_build import (
    SPECS,
    TOKENS,
    QuantizedBuild,
    checkpoint_logits,
    load,
    logprob_errors,
    normal,
    relative,
    transformers_logits,
)
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_kernels_blackwell.contracts import MXFP8, NVFP4
from tokenspeed_kernels_blackwell.linear.reference import mxfp8_values, nvfp4_values
from tokenspeed_quantization.schemes import FP8
from tokenspeed_server.dry_run import dry_run
from tokenspeed_server.settings import ServerConfig
from torch import Tensor
from torch.nn import functional

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.engine.planning import plan_kernels
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_models.layers import Linear, Projection
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightMap

METHODS = {"mxfp8": MXFP8, "nvfp4": NVFP4}
WRITERS = ("llm-compressor", "modelopt")
FORMS = [(form, writer) for form in FORMATS for writer in WRITERS]
PROJECTIONS = Projection("a", 24, None), Projection("b", 8, None)
# The relative error of the logits of tiny models that 8-bit or 4-bit activations cause.
ACTIVATIONS = {"mxfp8": (0.01, 0.12), "nvfp4": (0.05, 0.45)}


class UnquantizedActivations(QuantizedBuild):
    """A build with quantized weights and unquantized activations."""

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        if op.startswith("quantize_"):
            return lambda x, *scale: (x / scale[0] if scale else x, None)
        if op == "linear_mxfp8":
            return lambda x, none, w, w_scale, bias: functional.linear(
                x, mxfp8_values(w, w_scale), bias
            )
        if op == "linear_nvfp4":
            return lambda x, none, w, w_scale, scale, bias: functional.linear(
                x, nvfp4_values(w, w_scale) * scale, bias
            )
        return super().op(op, **problem)


def values(form: str, linear: Linear) -> Tensor:
    assert linear.scale is not None
    if form == "mxfp8":
        return mxfp8_values(linear.weight, linear.scale)
    assert linear.quantized_weight is not None
    assert linear.quantized_weight.tensor_scales is not None
    return (
        nvfp4_values(linear.weight, linear.scale)
        * linear.quantized_weight.tensor_scales.weight_scales
    )


def stored_layer(form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of two projections from compressed-tensors, and the stacked weight that it reads from them."""
    weights = {"a": normal(24, 128) * torch.logspace(-2, 1, 128), "b": normal(8, 128, seed=1)}
    largest = max(float(weight.abs().max()) for weight in weights.values())
    given, dequantized = {}, []
    for name, weight in weights.items():
        stored = compressed(form, weight, largest)
        dequantized.append(decompressed(form, stored))
        if form == "nvfp4":
            stored["input_global_scale"] = torch.tensor([448.0 * 6 / (3.0 if name == "a" else 5.0)])
        given |= {f"p.{name}.{part}": tensor for part, tensor in stored.items()}
    return given, torch.cat(dequantized)


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_linear_layer_has_the_values_of_compressed_tensors(form: str, writer: str) -> None:
    linear = Linear(QuantizedBuild(METHODS[form]), 128, PROJECTIONS)
    given, weight = stored_layer(form)
    given = by_modelopt(given) if writer == "modelopt" else given
    WeightMap(linear.slots("p.")).load(given.items())
    torch.testing.assert_close(values(form, linear), weight, rtol=1e-6, atol=0)
    x = normal(5, 128, seed=2)
    assert 0.005 < relative(linear(x), x @ weight.T) < (0.04 if form == "mxfp8" else 0.12)


def test_input_takes_the_largest_scale() -> None:
    linear = Linear(QuantizedBuild(NVFP4), 128, PROJECTIONS)
    given, _ = stored_layer("nvfp4")
    WeightMap(linear.slots("p.")).load(given.items())
    assert linear.quantized_weight is not None
    assert linear.quantized_weight.tensor_scales is not None
    scales = linear.quantized_weight.tensor_scales
    torch.testing.assert_close(scales.input_scale, torch.tensor([5 / 2688]))
    weight_scale = 1 / given["p.a.weight_global_scale"]
    torch.testing.assert_close(scales.output_scales, scales.input_scale * weight_scale)


def test_projections_may_have_different_scales() -> None:
    linear = Linear(UnquantizedActivations(NVFP4), 128, PROJECTIONS, bias=True)
    given, weight = stored_layer("nvfp4")
    given["p.b.weight_global_scale"] = given["p.b.weight_global_scale"] / 3
    bias = normal(32, seed=4)
    biases = {"p.a.bias": bias[:24], "p.b.bias": bias[24:]}
    WeightMap(linear.slots("p.")).load({**given, **biases}.items())
    weight[24:] *= 3
    x = normal(5, 128, seed=2)
    torch.testing.assert_close(linear(x), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_gate_and_up_may_have_different_scales(tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **SIZES)
    store(tmp_path, reference, "nvfp4", "modelopt", TOKENS)
    expected = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(NVFP4))
    tensors = load_file(tmp_path / "model.safetensors")
    # Move a power of two from the block scales to the per-tensor scale: the weights do not change.
    for layer, expert, projection, factor in (
        (1, 0, "up", 4),
        (1, 3, "gate", 8),
        (1, 4, "up", 2),
        (2, 2, "gate", 2),
    ):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        block_scale = tensors[f"{name}.weight_scale"].float() / factor
        tensors[f"{name}.weight_scale"] = block_scale.to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] *= factor
    save_file(tensors, tmp_path / "model.safetensors")
    found = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(NVFP4))
    # Block scales of the activations in between may be so small that they are rounded.
    assert relative(found, expected) < 0.03


@pytest.mark.parametrize(("form", "writer"), FORMS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_logits_equal_the_dequantized_model(
    family: str, form: str, writer: str, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    original = transformers_logits(reference)
    store(tmp_path, reference, form, writer, TOKENS)
    expected = transformers_logits(reference)
    assert relative(original, expected) > 0.01
    found = checkpoint_logits(SPECS[family], tmp_path, UnquantizedActivations(METHODS[form]))
    assert relative(found, expected) < 1e-5
    low, high = ACTIVATIONS[form]
    found = checkpoint_logits(SPECS[family], tmp_path, QuantizedBuild(METHODS[form]))
    assert low < relative(found, expected) < high


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_experts_are_quantized_and_routers_are_not(form: str, writer: str, tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **SIZES)
    stored = store(tmp_path, reference, form, writer, TOKENS)
    build = QuantizedBuild(METHODS[form])
    model = load(SPECS["Qwen3Moe"], tmp_path, build)
    router = stored["model.layers.1.mlp.gate.weight"]
    assert torch.equal(model.layers[1].mlp.router.gate.weight, router)
    low, high = ACTIVATIONS[form]
    found = sequence_logits(model, build, TOKENS)
    assert low < relative(found, transformers_logits(reference)) < 1.5 * high
    assert f"moe_experts_{form}" in {op for op, _ in build.problems}


@pytest.mark.parametrize(
    ("family", "form", "writer"),
    [
        ("Qwen3", "mxfp8", "modelopt"),
        ("Qwen3", "nvfp4", "llm-compressor"),
        ("Qwen3Moe", "mxfp8", "llm-compressor"),
        ("Qwen3Moe", "nvfp4", "modelopt"),
    ],
)
def test_served_logprobs_equal_the_model(
    family: str, form: str, writer: str, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    store(tmp_path, reference, form, writer, TOKENS)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_num_seqs=2
    ) as llm:
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        for op in (f"quantize_{form}", f"linear_{form}"):
            assert {planned.backend for planned in llm.kernel_plan.find(op)} == {"torch-blocks"}
    token_ids = TOKENS + list(answer.token_ids)
    build = QuantizedBuild(METHODS[form])
    logits = checkpoint_logits(SPECS[family], tmp_path, build, token_ids)[len(TOKENS) - 1 : -1]
    assert answer.logprobs is not None
    # With one token per step other values are ties.
    assert logprob_errors(answer.logprobs, logits).mean() < 0.1


def targets(*names: str) -> dict[str, Any]:
    """Return changes to `quantization_config` that quantize only modules with these names."""
    scheme = compressed_config("nvfp4")["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**scheme, "targets": list(names)}}}


@pytest.mark.parametrize(
    ("family", "writer", "ignored", "changes"),
    [
        ("Qwen3", "modelopt", "self_attn", {"ignore": ["lm_head", "*self_attn*"]}),
        (
            "Qwen3",
            "modelopt",
            "[od][a-z]*_proj",
            {"ignore": ["lm_head", "*.o_proj", "*.down_proj"]},
        ),
        ("Llama", "modelopt", r"layers\.0\.", {"ignore": ["lm_head", "model.layers.0"]}),
        (
            "Qwen3",
            "llm-compressor",
            r"layers\.[02]\.mlp",
            {"ignore": ["lm_head", r"re:.*layers\.[02]\.mlp\..*"]},
        ),
        ("Qwen2", "llm-compressor", "self_attn", targets(r"re:.*mlp\.(gate|up|down)_proj$")),
        (
            "Qwen3Moe",
            "llm-compressor",
            r"self_attn|layers\.0\.",
            targets(r"re:.*mlp\.experts\..*(gate|up|down)_proj$"),
        ),
        ("Qwen3Moe", "modelopt", "mlp", {"ignore": ["*.mlp.*", "lm_head"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ignored_modules_stay_unquantized(
    family: str, writer: str, ignored: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    store(tmp_path, reference, "nvfp4", writer, TOKENS, unquantized=ignored, **changes)
    expected, build = transformers_logits(reference), QuantizedBuild(NVFP4)
    found = checkpoint_logits(SPECS[family], tmp_path, build)
    low, high = ACTIVATIONS["nvfp4"]
    assert low / 3 < relative(found, expected) < 1.5 * high
    # The experts op quantizes activations itself.
    if not any(op.startswith("moe_experts_") for op, _ in build.problems):
        exact = UnquantizedActivations(NVFP4)
        assert relative(checkpoint_logits(SPECS[family], tmp_path, exact), expected) < 1e-5
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_num_seqs=2
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
    assert answer.logprobs is not None
    assert logprob_errors(answer.logprobs, found[-1:])[0] < 0.1


def test_stacked_layers_with_different_schemes_are_refused(tmp_path: Path) -> None:
    reference = save_reference("Qwen3", tmp_path, **SIZES)
    ignored = "model.layers.1.self_attn.k_proj"
    store(tmp_path, reference, "nvfp4", "modelopt", TOKENS, ignore=["lm_head", ignored])
    config = ServerConfig.from_keywords(model=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    with pytest.raises(CheckpointError, match=r"nvfp4 for .*q_proj and none for .*k_proj"):
        dry_run(config)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_quantizing_on_load_is_close_to_the_stored_checkpoint(family: str, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    original = transformers_logits(reference)
    found = checkpoint_logits(SPECS[family], tmp_path, QuantizedBuild(MXFP8))
    store(tmp_path, reference, "mxfp8", "llm-compressor", TOKENS)
    expected = checkpoint_logits(SPECS[family], tmp_path, QuantizedBuild(MXFP8))
    assert 0.01 < relative(found, original) < 0.2
    # Both use power-of-two scales, but may choose different ones.
    assert relative(found, expected) < 0.2


def test_stacked_experts_are_quantized_on_load(tmp_path: Path) -> None:
    save_reference("Qwen3Moe", tmp_path, **SIZES)
    expected = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(MXFP8))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        weights = {
            name: [tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(5)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = zip(weights["gate_proj"], weights["up_proj"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gate_up])
        tensors[f"{prefix}.down_proj"] = torch.stack(weights["down_proj"])
    save_file(tensors, tmp_path / "model.safetensors")
    found = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(MXFP8))
    assert torch.equal(found, expected)


def test_nvfp4_is_not_quantized_on_load(tmp_path: Path) -> None:
    save_reference("Qwen3", tmp_path, **SIZES)
    config = ServerConfig.from_keywords(
        model=str(tmp_path), quantization="nvfp4", device="cpu", skip_tokenizer_init=True
    )
    with pytest.raises(ConfigError, match="--quantization nvfp4"):
        dry_run(config)


def write_modelopt_config(folder: Path, form: str) -> None:
    """Add the `quantization_config` of a ModelOpt checkpoint to config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = MODELOPT[form]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", FORMATS)
def test_dummy_weights_run_the_kernels_of_the_format(form: str, tmp_path: Path) -> None:
    save_reference("Qwen3", tmp_path, **SIZES)
    write_modelopt_config(tmp_path, form)
    settings: dict[str, Any] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
    }
    assert f"linear_{form}" in dry_run(ServerConfig.from_keywords(model=str(tmp_path), **settings))
    with LLM(str(tmp_path), max_total_tokens=256, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
        answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0]
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize(
    ("family", "form"), [("Qwen3", "mxfp8"), ("Qwen3", "nvfp4"), ("Qwen3Moe", "nvfp4")]
)
def test_kernels_of_the_device_are_planned(family: str, form: str, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "head_dim": 64,
    }
    save_reference(family, tmp_path, **sizes, dtype="bfloat16")
    write_modelopt_config(tmp_path, form)
    ops = [f"quantize_{form}", f"linear_{form}"]
    if family == "Qwen3Moe":
        ops.append(f"moe_experts_{form}")
    settings = ServerConfig.from_keywords(model=str(tmp_path), dtype="bfloat16", enforce_eager=True)
    for capability, backend in (((10, 0), "blackwell"), ((9, 0), "torch-blocks")):
        _, plan = plan_kernels(settings, PlatformInfo("cuda", capability, "another device"))
        for op in ops:
            assert {planned.backend for planned in plan.find(op)} == {backend}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(given: dict[str, Tensor]) -> None:
        given[name] = change(given[name])

    return apply


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("mxfp8", lambda given: given.pop("p.b.weight_scale"), "missing: p.b.weight_scale"),
        (
            "mxfp8",
            changed("p.a.weight_scale", lambda scale: scale.float()),
            "p.a.weight_scale is torch.float32, expected torch.uint8",
        ),
        (
            "mxfp8",
            changed("p.a.weight", lambda values: values[:, :64]),
            r"p.a.weight has shape \[24, 64\], expected",
        ),
        ("nvfp4", lambda given: given.pop("p.b.input_global_scale"), "missing: p.b.input_scale"),
        (
            "nvfp4",
            changed("p.a.weight_scale", lambda scale: scale.float()),
            "p.a.weight_scale is torch.float32, expected torch.float8_e4m3fn",
        ),
        (
            "nvfp4",
            changed("p.a.weight_packed", lambda values: values.view(torch.int8)),
            "p.a.weight_packed is torch.int8, expected torch.uint8",
        ),
        (
            "nvfp4",
            changed("p.b.weight_global_scale", lambda scale: torch.tensor([float("nan")])),
            "p.b.weight_global_scale is nan",
        ),
        (
            "nvfp4",
            changed("p.b.input_global_scale", lambda scale: 0 * scale),
            "p.b.input_global_scale is inf",
        ),
        (
            "nvfp4",
            changed("p.b.input_global_scale", lambda scale: scale.repeat(2)),
            r"p.b.input_global_scale has shape \[2\], expected \[1\]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_weight_or_scale_is_named(
    form: str, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    linear = Linear(QuantizedBuild(METHODS[form]), 128, PROJECTIONS)
    given, _ = stored_layer(form)
    change(given)
    with pytest.raises(ValueError, match=message):
        WeightMap(linear.slots("p.")).load(given.items())


def test_quantized_weights_of_another_format_are_refused() -> None:
    given, _ = stored_layer("nvfp4")
    unquantized = Linear(DenseBuild(), 128, PROJECTIONS)
    with pytest.raises(ValueError, match=r"p.a.weight has shape \[24, 64\], expected \[24, 128\]"):
        WeightMap(unquantized.slots("p.")).load(by_modelopt(given).items())
    per_channel = Linear(QuantizedBuild(FP8), 128, PROJECTIONS)
    given, _ = stored_layer("mxfp8")
    with pytest.raises(ValueError, match=r"p\.a\.weight_scale has shape"):
        WeightMap(per_channel.slots("p.")).load(given.items())


@pytest.mark.parametrize("form", FORMATS)
def test_hf_quant_config_is_read(form: str, tmp_path: Path) -> None:
    reference = save_reference("Qwen3", tmp_path, **SIZES)
    store(tmp_path, reference, form, "modelopt", TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {
        "model": str(tmp_path),
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    assert f"linear_{form}" not in dry_run(ServerConfig.from_keywords(**settings))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {
                "producer": {"name": "modelopt", "version": "0.23.0"},
                "quantization": {
                    "quant_algo": form.upper(),
                    "kv_cache_quant_algo": "FP8",
                    "group_size": 16 if form == "nvfp4" else 32,
                    "exclude_modules": ["lm_head"],
                },
            }
        )
    )
    assert f"linear_{form}" in dry_run(ServerConfig.from_keywords(**settings))
