"""MXFP8 and NVFP4: checkpoints that compressed-tensors packed, from a layer to the server, and what is refused."""

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
from quantized_build import QuantizedBuild
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_kernels_blackwell.contracts import MXFP8_METHOD, NVFP4_METHOD
from tokenspeed_kernels_blackwell.linear.reference import mxfp8_values, nvfp4_values
from torch import Tensor
from torch.nn import functional

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import ModelSpec
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.config import Config
from tokenspeed_core.engine.dry_run import dry_run, plan_kernels
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_kernels.contracts import FP8_METHOD
from tokenspeed_models.descriptors import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from tokenspeed_models.layers import Linear, Projection
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightMap

METHODS = {"mxfp8": MXFP8_METHOD, "nvfp4": NVFP4_METHOD}
WRITERS = ("llm-compressor", "modelopt")
FORMS = [(form, writer) for form in FORMATS for writer in WRITERS]
TOKENS = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# Logits of models this small, weights being the same: what activations of four or eight bits move.
ACTIVATIONS = {"mxfp8": (0.01, 0.12), "nvfp4": (0.05, 0.45)}


class WholeActivations(QuantizedBuild):
    """A build whose weights are quantised and whose activations are not."""

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


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


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


def load(spec: ModelSpec, folder: Path, build: DenseBuild) -> Any:
    model = load_target(spec.load)(json.loads((folder / "config.json").read_text()), build)
    model.load_weights(read_safetensors(str(folder), model, lambda done, total: None))
    return model


def expected_logits(model: Any, token_ids: list[int] = TOKENS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def stored_layer(form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return two projections as compressed-tensors packs them, and what it reads of them, one under the other."""
    weights = {"a": normal(24, 128) * torch.logspace(-2, 1, 128), "b": normal(8, 128, seed=1)}
    largest = max(float(weight.abs().max()) for weight in weights.values())
    given, whole = {}, []
    for name, weight in weights.items():
        stored = compressed(form, weight, largest)
        whole.append(decompressed(form, stored))
        if form == "nvfp4":
            stored["input_global_scale"] = torch.tensor([448.0 * 6 / (3.0 if name == "a" else 5.0)])
        given |= {f"p.{name}.{part}": tensor for part, tensor in stored.items()}
    return given, torch.cat(whole)


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_a_layer_holds_the_values_that_compressed_tensors_reads(form: str, writer: str) -> None:
    linear = Linear(
        QuantizedBuild(METHODS[form]), 128, (Projection("a", 24, None), Projection("b", 8, None))
    )
    given, whole = stored_layer(form)
    WeightMap(linear.slots("p.")).load(
        (by_modelopt(given) if writer == "modelopt" else given).items()
    )
    torch.testing.assert_close(values(form, linear), whole, rtol=1e-6, atol=0)
    x = normal(5, 128, seed=2)
    expected = x @ whole.T
    assert 0.005 < relative(linear(x), expected) < (0.04 if form == "mxfp8" else 0.12)


def test_activations_take_the_widest_factor_and_products_that_of_both() -> None:
    linear = Linear(
        QuantizedBuild(NVFP4_METHOD), 128, (Projection("a", 24, None), Projection("b", 8, None))
    )
    given, _ = stored_layer("nvfp4")
    WeightMap(linear.slots("p.")).load(given.items())
    assert linear.quantized_weight is not None
    assert linear.quantized_weight.tensor_scales is not None
    scales = linear.quantized_weight.tensor_scales
    torch.testing.assert_close(scales.input_scale, torch.tensor([5 / 2688]))
    weight = 1 / given["p.a.weight_global_scale"]
    torch.testing.assert_close(scales.output_scales, scales.input_scale * weight)


def test_projections_may_have_factors_of_their_own() -> None:
    linear = Linear(
        WholeActivations(NVFP4_METHOD),
        128,
        (Projection("a", 24, None), Projection("b", 8, None)),
        bias=True,
    )
    given, whole = stored_layer("nvfp4")
    given["p.b.weight_global_scale"] = given["p.b.weight_global_scale"] / 3
    bias = normal(32, seed=4)
    WeightMap(linear.slots("p.")).load(
        {**given, "p.a.bias": bias[:24], "p.b.bias": bias[24:]}.items()
    )
    whole[24:] *= 3
    x = normal(5, 128, seed=2)
    torch.testing.assert_close(linear(x), x @ whole.T + bias, rtol=1e-5, atol=1e-5)


def test_gate_and_up_of_an_expert_may_have_factors_of_their_own(tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **SIZES)
    store(tmp_path, reference, "nvfp4", "modelopt", TOKENS)
    build = QuantizedBuild(NVFP4_METHOD)
    before = sequence_logits(load(QWEN3_MOE, tmp_path, build), build, TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    # Powers of two go from the scales of groups to the factor over all: the values of the weights stay as they are.
    for layer, expert, projection, shift in (
        (1, 0, "up", 4),
        (1, 3, "gate", 8),
        (1, 4, "up", 2),
        (2, 2, "gate", 2),
    ):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"
        tensors[f"{name}.weight_scale_2"] *= shift
        tensors[f"{name}.weight_scale"] = (tensors[f"{name}.weight_scale"].float() / shift).to(
            torch.float8_e4m3fn
        )
    save_file(tensors, tmp_path / "model.safetensors")
    again = QuantizedBuild(NVFP4_METHOD)
    found = sequence_logits(load(QWEN3_MOE, tmp_path, again), again, TOKENS)
    assert relative(found, before) < 0.03, (
        "scales of groups between may be so small that they are rounded"
    )


@pytest.mark.parametrize(("form", "writer"), FORMS)
@pytest.mark.parametrize(("spec", "family"), [(LLAMA, "Llama"), (QWEN2, "Qwen2"), (QWEN3, "Qwen3")])
def test_logits_are_those_of_the_weights_that_compressed_tensors_reads(
    spec: ModelSpec, family: str, form: str, writer: str, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    before = expected_logits(reference)
    store(tmp_path, reference, form, writer, TOKENS)
    expected = expected_logits(reference)
    assert relative(before, expected) > 0.01, "the weights are no longer what they were"
    whole, build = WholeActivations(METHODS[form]), QuantizedBuild(METHODS[form])
    assert relative(sequence_logits(load(spec, tmp_path, whole), whole, TOKENS), expected) < 1e-5
    least, most = ACTIVATIONS[form]
    assert (
        least
        < relative(sequence_logits(load(spec, tmp_path, build), build, TOKENS), expected)
        < most
    )


@pytest.mark.parametrize(("form", "writer"), FORMS)
def test_experts_are_read_beside_a_router_that_stays_whole(
    form: str, writer: str, tmp_path: Path
) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **SIZES)
    stored = store(tmp_path, reference, form, writer, TOKENS)
    build = QuantizedBuild(METHODS[form])
    model = load(QWEN3_MOE, tmp_path, build)
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(model.layers[1].mlp.router.weight, stored[router])
    least, most = ACTIVATIONS[form]
    expected = expected_logits(reference)
    assert least < relative(sequence_logits(model, build, TOKENS), expected) < 1.5 * most
    assert f"moe_experts_{form}" in {op for op, _ in build.problems}


@pytest.mark.parametrize(("form", "writer"), FORMS)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_a_served_checkpoint_answers_with_the_models_logprobs(
    family: str, form: str, writer: str, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    store(tmp_path, reference, form, writer, TOKENS)
    spec, build = {"Qwen3": QWEN3, "Qwen3Moe": QWEN3_MOE}[family], QuantizedBuild(METHODS[form])
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_num_seqs=2
    ) as llm:
        answer = llm.generate([{"prompt_token_ids": TOKENS}], asked)[0].outputs[0]
        for op in (f"quantize_{form}", f"linear_{form}"):
            assert {planned.backend for planned in llm.kernel_plan.find(op)} == {"torch-blocks"}
    logits = sequence_logits(load(spec, tmp_path, build), build, TOKENS + list(answer.token_ids))
    assert answer.logprobs is not None
    errors = torch.tensor(
        [
            found.logprob - float(row[token])
            for step, row in zip(
                answer.logprobs, logits[len(TOKENS) - 1 : -1].log_softmax(dim=-1), strict=True
            )
            for token, found in step.items()
        ]
    )
    # other values lie in the middle of two codes when tokens come one at a time
    assert errors.abs().mean() < 0.1


def _targets(*names: str) -> dict[str, Any]:
    scheme = compressed_config("nvfp4")["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**scheme, "targets": list(names)}}}


@pytest.mark.parametrize(
    ("family", "writer", "whole_names", "changes"),
    [
        ("Qwen3", "modelopt", "self_attn", {"ignore": ["lm_head", "*self_attn*"]}),
        ("Llama", "modelopt", r"layers\.0\.", {"ignore": ["lm_head", "model.layers.0"]}),
        (
            "Qwen3",
            "llm-compressor",
            r"layers\.[02]\.mlp",
            {"ignore": ["lm_head", r"re:.*layers\.[02]\.mlp\..*"]},
        ),
        ("Qwen2", "llm-compressor", "self_attn", _targets(r"re:.*mlp\.(gate|up|down)_proj$")),
        (
            "Qwen3Moe",
            "llm-compressor",
            r"self_attn|layers\.0\.",
            _targets(r"re:.*mlp\.experts\..*(gate|up|down)_proj$"),
        ),
        ("Qwen3Moe", "modelopt", "mlp", {"ignore": ["*.mlp.*", "lm_head"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_or_the_rest_of_a_layer_may_be_kept_whole(
    family: str, writer: str, whole_names: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    spec = {"Llama": LLAMA, "Qwen2": QWEN2, "Qwen3": QWEN3, "Qwen3Moe": QWEN3_MOE}[family]
    reference = save_reference(family, tmp_path, **SIZES)
    store(tmp_path, reference, "nvfp4", writer, TOKENS, whole_names=whole_names, **changes)
    expected, build, whole = (
        expected_logits(reference),
        QuantizedBuild(NVFP4_METHOD),
        WholeActivations(NVFP4_METHOD),
    )
    found = sequence_logits(load(spec, tmp_path, build), build, TOKENS)
    least, most = ACTIVATIONS["nvfp4"]
    assert least / 3 < relative(found, expected) < 1.5 * most
    if not any(op.startswith("moe_experts_") for op, _ in build.problems):  # which quantises within
        assert (
            relative(sequence_logits(load(spec, tmp_path, whole), whole, TOKENS), expected) < 1e-5
        )
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_num_seqs=2
    ) as llm:
        asked = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], asked)[0].outputs[0]
    assert answer.logprobs is not None
    ((token, likeliest),) = [(token, each.logprob) for token, each in answer.logprobs[0].items()][
        :1
    ]
    assert abs(likeliest - float(found[-1].log_softmax(dim=-1)[token])) < 0.1


def test_a_part_of_which_some_is_kept_whole_ends_the_start_by_name(tmp_path: Path) -> None:
    reference = save_reference("Qwen3", tmp_path, **SIZES)
    store(
        tmp_path,
        reference,
        "nvfp4",
        "modelopt",
        TOKENS,
        ignore=["lm_head", "model.layers.1.self_attn.o_proj"],
    )
    config = Config.from_keywords(model=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    with pytest.raises(
        CheckpointError, match=r"ignores model.layers.1.self_attn.o_proj but quantizes .*q_proj"
    ):
        dry_run(config)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_quantised_on_load_a_whole_checkpoint_gives_what_its_stored_form_gives(
    family: str, tmp_path: Path
) -> None:
    spec = {"Qwen3": QWEN3, "Qwen3Moe": QWEN3_MOE}[family]
    reference = save_reference(family, tmp_path, **SIZES)
    before, whole, stored = (
        expected_logits(reference),
        QuantizedBuild(MXFP8_METHOD),
        QuantizedBuild(MXFP8_METHOD),
    )
    on_load = sequence_logits(load(spec, tmp_path, whole), whole, TOKENS)
    store(tmp_path, reference, "mxfp8", "llm-compressor", TOKENS)
    again = sequence_logits(load(spec, tmp_path, stored), stored, TOKENS)
    assert 0.01 < relative(on_load, before) < 0.2
    assert relative(on_load, again) < 0.2, (
        "its scales are powers of two as well, not always the same"
    )


def test_stacked_experts_of_newer_writers_are_quantised_on_load_one_by_one(tmp_path: Path) -> None:
    save_reference("Qwen3Moe", tmp_path, **SIZES)
    build = QuantizedBuild(MXFP8_METHOD)
    expected = sequence_logits(load(QWEN3_MOE, tmp_path, build), build, TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors.pop(f"{prefix}.{expert}.{part}.weight") for expert in range(5)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(each) for each in both])
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, tmp_path / "model.safetensors")
    stacked = QuantizedBuild(MXFP8_METHOD)
    assert torch.equal(
        sequence_logits(load(QWEN3_MOE, tmp_path, stacked), stacked, TOKENS), expected
    )


def test_nvfp4_is_not_quantised_on_load_which_is_said_before_weights_are_read(
    tmp_path: Path,
) -> None:
    save_reference("Qwen3", tmp_path, **SIZES)
    config = Config.from_keywords(
        model=str(tmp_path), quantization="nvfp4", device="cpu", skip_tokenizer_init=True
    )
    with pytest.raises(
        ConfigError, match=r"--quantization nvfp4: .*measured on prompts.*that is nvfp4 already"
    ):
        dry_run(config)


@pytest.mark.parametrize("form", FORMATS)
def test_a_server_without_weights_runs_the_kernels_of_the_form(form: str, tmp_path: Path) -> None:
    save_reference("Qwen3", tmp_path, **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": MODELOPT[form]})
    )
    settings: dict[str, Any] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
    }
    assert f"linear_{form}" in dry_run(Config.from_keywords(model=str(tmp_path), **settings))
    with LLM(str(tmp_path), max_total_tokens=256, **settings) as llm:
        asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
        answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], asked)[0].outputs[0]
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize(
    ("family", "form"), [("Qwen3", "mxfp8"), ("Qwen3", "nvfp4"), ("Qwen3Moe", "nvfp4")]
)
def test_on_a_device_that_scales_operands_itself_the_plan_has_its_kernels(
    family: str, form: str, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "head_dim": 64,
    }
    save_reference(family, tmp_path, **sizes, dtype="bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": MODELOPT[form]})
    )
    ops = [
        f"quantize_{form}",
        f"linear_{form}",
        *([f"moe_experts_{form}"] if family == "Qwen3Moe" else []),
    ]
    for capability, backend in (((10, 0), "blackwell"), ((9, 0), "torch-blocks")):
        settings = Config.from_keywords(model=str(tmp_path), dtype="bfloat16", enforce_eager=True)
        _, plan = plan_kernels(
            settings, PlatformInfo("cuda", capability, "a device that is not here")
        )
        assert {(op, planned.backend) for op in ops for planned in plan.find(op)} == {
            (op, backend) for op in ops
        }


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
            changed("p.a.weight", lambda codes: codes[:, :64]),
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
            changed("p.a.weight_packed", lambda codes: codes.view(torch.int8)),
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
def test_what_is_wrong_with_a_stored_weight_is_said_by_name(
    form: str, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    linear = Linear(
        QuantizedBuild(METHODS[form]), 128, (Projection("a", 24, None), Projection("b", 8, None))
    )
    given, _ = stored_layer(form)
    change(given)
    with pytest.raises(ValueError, match=message):
        WeightMap(linear.slots("p.")).load(given.items())


def test_codes_in_a_checkpoint_that_says_nothing_of_them_are_refused() -> None:
    given, _ = stored_layer("nvfp4")
    whole = Linear(DenseBuild(), 128, (Projection("a", 24, None), Projection("b", 8, None)))
    with pytest.raises(ValueError, match=r"p.a.weight has shape \[24, 64\], expected \[24, 128\]"):
        WeightMap(whole.slots("p.")).load(by_modelopt(given).items())
    packed = Linear(
        QuantizedBuild(FP8_METHOD), 128, (Projection("a", 24, None), Projection("b", 8, None))
    )
    given, _ = stored_layer("mxfp8")
    with pytest.raises(ValueError, match=r"p\.a\.weight_scale has shape"):
        WeightMap(packed.slots("p.")).load(given.items())


@pytest.mark.parametrize("form", FORMATS)
def test_modelopts_own_file_is_read_in_place_of_config_json(form: str, tmp_path: Path) -> None:
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
    assert f"linear_{form}" not in dry_run(Config.from_keywords(**settings))
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
    assert f"linear_{form}" in dry_run(Config.from_keywords(**settings))
