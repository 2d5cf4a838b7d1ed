"""FP8 with per-channel and per-token scales: ops, layers, models and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_build import (
    PER_CHANNEL,
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
from tokenspeed_quantization.schemes import FP8

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import BuildContext, ModelSpec, QuantizationScheme
from tokenspeed_core.checkpoint.quantization import ResolvedQuantization
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.errors import CheckpointError, ConfigError, PluginError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.targets import load_target
from tokenspeed_core.worker.local import plan_only
from tokenspeed_kernels import inputs
from tokenspeed_kernels.reference import activation, fp8, fp8_block, moe_w8a8, norm
from tokenspeed_models.describe import read_qwen3
from tokenspeed_models.layers import Linear, Projection
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightMap

HALF_STEP = 2.0**-4  # the relative rounding error of e4m3: four significant bits
OTHER = QuantizationScheme("other", "float8_e4m3fn", "quantize_fp8", "linear_fp8")
EVERYWHERE = ResolvedQuantization("other", lambda layer: OTHER)


def test_rows_are_quantized_with_their_own_scale() -> None:
    x = normal(5, 300) * torch.tensor([1e-3, 1.0, 0.0, 400.0, 1e4]).unsqueeze(1)
    y, scale = fp8.quantize_rows(x)
    assert y.dtype == torch.float8_e4m3fn
    expected = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / 448
    torch.testing.assert_close(scale, expected, rtol=1e-6, atol=0)
    assert y.float().abs().amax(dim=1).tolist() == [448.0, 448.0, 0.0, 448.0, 448.0]
    error = (y.float() * scale - x).abs()
    assert (error <= HALF_STEP * x.abs() + 2.0**-10 * scale).all()


def test_linear_multiplies_the_stored_values() -> None:
    x, weight, bias = normal(7, 96), normal(40, 96, seed=1), normal(40, seed=2)
    (x8, x_scale), (w8, w_scale) = fp8.quantize_rows(x), fp8.quantize_rows(weight)
    problem = {"in_size": 96, "out_size": 40, "dtype": "float32"}
    found = fp8.linear_fp8(problem)(x8, x_scale, w8, w_scale, bias)
    exact = (x8.double() * x_scale.double()) @ (w8.double() * w_scale.double()).T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    # each operand is off by 2.7 %
    assert 0.005 < relative(found, x.double() @ weight.double().T + bias.double()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("add_norm", "silu_mul", "quantize"),
    [
        (fp8.add_rms_norm_fp8, fp8.silu_mul_fp8, fp8.quantize_rows),
        (
            fp8_block.add_rms_norm_fp8_groups,
            fp8_block.silu_mul_fp8_groups,
            fp8_block.quantize_groups,
        ),
    ],
    ids=["per-token", "block-wise"],
)
def test_fused_ops_equal_the_separate_ops(
    add_norm: Any, silu_mul: Any, quantize: Any, dtype: torch.dtype
) -> None:
    problem = {"size": 200, "dtype": str(dtype).removeprefix("torch.")}
    x, residual, weight = (normal(*shape).to(dtype) for shape in ((6, 200), (6, 200), (200,)))
    halves = normal(6, 400).to(dtype)
    *found, total = add_norm(problem)(x, residual.clone(), weight, 1e-6)
    normed, expected_total = norm.add_rms_norm(problem)(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, expected_total)
    found.extend(silu_mul(problem)(halves))
    expected = (*quantize(normed), *quantize(activation.silu_mul(problem)(halves)))
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got.float(), want.float())


def test_linear_layer_has_a_scale_per_channel() -> None:
    build = QuantizedBuild(FP8, torch.bfloat16)
    linear = Linear(build, 32, (Projection("a", 24, None), Projection("b", 8, None)), bias=True)
    assert linear.weight.dtype == torch.float8_e4m3fn
    assert linear.scale is not None
    assert linear.scale.shape == (32, 1)
    stored = {
        "p.a.weight": normal(24, 32),
        "p.b.weight": 100 * normal(8, 32),
        "p.a.bias": normal(24),
        "p.b.bias": normal(8),
    }
    WeightMap(linear.slots("p.")).load(stored.items())
    weight = torch.cat([stored["p.a.weight"], stored["p.b.weight"]]).to(torch.bfloat16).float()
    error = (linear.weight.float() * linear.scale - weight).abs()
    assert (error <= HALF_STEP * weight.abs() + 2e-3 * linear.scale).all()
    x = normal(3, 32, seed=5).to(torch.bfloat16)
    expected = x.float() @ weight.T + torch.cat([stored["p.a.bias"], stored["p.b.bias"]])
    assert relative(linear(x).float(), expected) < 0.06


def test_experts_multiply_the_stored_values() -> None:
    problem = {
        "num_experts": 6,
        "top_k": 3,
        "hidden_size": 48,
        "intermediate_size": 40,
        "dtype": "float32",
    }
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)
    given = inputs.moe_experts_fp8(problem, 9, device, generator, strided=True)
    found = moe_w8a8.moe_experts_fp8(problem)(*given.values())
    gate_up = given["gate_up"].double() * given["gate_up_scale"].double()
    down = given["down"].double() * given["down_scale"].double()
    x8, scale = fp8.quantize_rows(given["x"])
    for token, x in enumerate(x8.double() * scale.double()):
        total = torch.zeros(48).double()
        routes = zip(given["ids"][token].tolist(), given["weights"][token].tolist(), strict=True)
        for expert, weight in routes:
            if expert == len(gate_up):  # no expert
                continue
            gate, up = (gate_up[expert] @ x).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up).float()[None]
            hidden8, hidden_scale = fp8.quantize_rows(hidden)
            total += weight * (down[expert] @ (hidden8.double() * hidden_scale.double())[0])
        torch.testing.assert_close(found[token].double(), total, rtol=1e-4, atol=1e-4)
    empty = inputs.moe_experts_fp8(problem, 0, device, generator, strided=False)
    assert moe_w8a8.moe_experts_fp8(problem)(*empty.values()).shape == (0, 48)


@pytest.mark.parametrize(
    ("family", "unquantized"),
    [
        ("Llama", [101]),
        ("Qwen2", [101]),
        ("Qwen3", [101]),
        # the routers of two layers and the head
        ("Qwen3Moe", [5, 5, 101]),
    ],
)
def test_logits_are_close_to_the_unquantized_model(
    family: str, unquantized: list[int], tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, initializer_range=0.08)
    build = QuantizedBuild(FP8)
    found = checkpoint_logits(SPECS[family], tmp_path, build)
    # three layers of random weights; each GEMM is off by about 4 %
    assert 0.01 < relative(found, transformers_logits(reference)) < 0.15
    ops = {op for op, _ in build.problems}
    assert {"linear_fp8", "quantize_fp8", "add_rms_norm_linear_fp8", "silu_mul_fp8"} <= ops
    assert ("moe_experts_fp8" in ops) == (family == "Qwen3Moe")
    sizes = [problem["out_size"] for op, problem in build.problems if op == "linear"]
    assert sizes == unquantized


def test_experts_are_served_in_fp8(tmp_path: Path) -> None:
    save_reference("Qwen3Moe", tmp_path, initializer_range=0.08)
    expected = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(FP8))
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), quantization="fp8", max_total_tokens=256, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        assert {planned.backend for planned in llm.kernel_plan.find("moe_experts_fp8")} == {"torch"}
    assert answer.logprobs is not None
    assert logprob_errors(answer.logprobs, expected[-1:]).max() < 0.05


def test_dummy_weights_are_quantized_on_load() -> None:
    build = QuantizedBuild(FP8, torch.bfloat16)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    model = load_target(SPECS["Qwen3"].load)(config, build)
    given = dict(read_dummy("", model, lambda done, total: None))
    assert {tensor.dtype for tensor in given.values()} == {torch.bfloat16}
    query = given["model.layers.0.self_attn.q_proj.weight"]
    assert query.shape == (32, 32)
    model.load_weights(given.items())
    qkv = model.layers[0].attention.qkv
    loaded = qkv.weight[:32].float() * qkv.scale[:32]
    torch.testing.assert_close(loaded, query.float(), rtol=HALF_STEP, atol=1e-3)


def test_unknown_method_is_refused() -> None:
    config = Config.from_keywords(quantization="fp9")
    with pytest.raises(PluginError, match=r"'fp9'.*fp8"):
        resolve(config, discover(config))


def test_method_without_experts_refuses_models_with_experts(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    resolved = tiny(hf_overrides={"architectures": ["Qwen3MoeForCausalLM"], **experts})
    with pytest.raises(CheckpointError, match="quantization other"):
        plan_only(replace(resolved, quantization=EVERYWHERE), catalog)


class NoLinears:
    """A family that does not use the ops of a quantization method."""

    def __init__(self, config: dict[str, Any], build: BuildContext) -> None:
        decoder = read_qwen3(config)
        for layer in build.each_layer(decoder.num_layers):
            build.attention(
                layer=layer,
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_size=decoder.head_size,
                scale=1.0,
            )


def test_method_without_effect_on_a_family_is_refused(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    resolved = replace(tiny(), quantization=EVERYWHERE)
    plan, memory, schemes = plan_only(resolved, catalog)
    assert schemes["model.layers.1.self_attn.k_proj"] == OTHER
    assert plan.find("linear_fp8")
    assert not plan.find("silu_mul_fp8")
    assert memory["weight_bytes"] is None
    spec = ModelSpec("Qwen3ForCausalLM", "", f"{__name__}:NoLinears")
    with pytest.raises(
        CheckpointError, match=r"--quantization other has no effect: Qwen3ForCausalLM"
    ):
        plan_only(replace(resolved, checkpoint=replace(resolved.checkpoint, spec=spec)), catalog)


def store_quantized(folder: Path, **changes: Any) -> None:
    """Quantize a checkpoint on disk as compressed-tensors does: e4m3 weights, bfloat16 scales [O, 1]."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**PER_CHANNEL, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = (tensor.abs().amax(dim=1, keepdim=True) / 448).to(torch.bfloat16)
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensor / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_quantized_checkpoint_is_read_unchanged(family: str, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path, initializer_range=0.08)
    store_quantized(tmp_path)
    build = QuantizedBuild(FP8)
    model = load(SPECS[family], tmp_path, build)
    stored = load_file(tmp_path / "model.safetensors")
    layer, name = model.layers[1], "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(layer.attention.qkv.weight[:64].float(), stored[name].float())
    assert torch.equal(layer.attention.qkv.scale[:64], stored[f"{name}_scale"].float())
    if family == "Qwen3Moe":
        up = stored["model.layers.1.mlp.experts.3.up_proj.weight"]
        assert torch.equal(layer.mlp.experts.gate_up[3, 24:].float(), up.float())
        assert torch.equal(layer.mlp.router.gate.weight, stored["model.layers.1.mlp.gate.weight"])
    found = sequence_logits(model, build, TOKENS)
    assert relative(found, transformers_logits(reference)) < 0.15


def test_missing_and_unexpected_scales_are_named() -> None:
    projections = Projection("a", 4, None), Projection("b", 4, None)
    linear = Linear(QuantizedBuild(FP8), 16, projections)
    quantized, scale = fp8.quantize_rows(normal(4, 16))
    given = {"a.weight": quantized, "b.weight": normal(4, 16), "b.weight_scale": scale}
    with pytest.raises(ValueError, match=r"missing: a.weight_scale; unexpected: b.weight_scale"):
        WeightMap(linear.slots("")).load(given.items())
    unquantized = Linear(DenseBuild(), 16, (Projection("a", 4, None),))
    with pytest.raises(ValueError, match=r"unexpected: a.weight_scale; a.weight"):
        WeightMap(unquantized.slots("")).load(
            {"a.weight": quantized, "a.weight_scale": scale}.items()
        )


def test_method_of_the_checkpoint_is_used_and_another_refused(tmp_path: Path) -> None:
    save_reference("Qwen3", tmp_path)
    store_quantized(tmp_path)
    config = Config.from_keywords(model=str(tmp_path), skip_tokenizer_init=True)
    catalog = discover(config)
    found = resolve(config, catalog).quantization
    assert found is not None
    assert found.name == "compressed-tensors"
    assert found.scheme_of("model.layers.0.mlp.up_proj") == FP8
    with pytest.raises(ConfigError, match=r"--quantization mxfp8: .* compressed-tensors"):
        resolve(Config.from_keywords(model=str(tmp_path), quantization="mxfp8"), catalog)
