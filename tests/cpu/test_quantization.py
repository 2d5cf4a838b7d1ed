"""Linear maps in eight bits: what the numbers are, what the layers hold, what a model makes of it, what is refused."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_build import QuantizedBuild
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from torch import Tensor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import ModelSpec, Quantization
from tokenspeed_core.config import Config
from tokenspeed_core.engine.dry_run import dry_run
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.errors import CheckpointError, ConfigError, PluginError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.local import plan_only
from tokenspeed_kernels import inputs
from tokenspeed_kernels.contracts import FP8_METHOD
from tokenspeed_kernels.reference import activation, fp8, moe, norm
from tokenspeed_models.descriptors import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from tokenspeed_models.layers import Linear, Projection
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightMap

HALF_STEP = 2.0**-4  # of an e4m3 number, relative: four significant bits, rounded
OTHER = Quantization("other", "float8_e4m3fn", "quantize_fp8", "linear_fp8")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_row_is_stored_with_four_bits_an_element_and_its_own_scale() -> None:
    x = normal(5, 300) * torch.tensor([1e-3, 1.0, 0.0, 400.0, 1e4]).unsqueeze(1)
    y, scale = fp8.quantize_rows(x)
    assert y.dtype == torch.float8_e4m3fn
    assert scale.tolist() == [
        [max(row, 1e-10) / 448] for row in x.abs().amax(dim=1).tolist()
    ] or torch.allclose(
        scale, x.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / 448, rtol=1e-6, atol=0
    )
    assert (y.float().abs().amax(dim=1) == torch.tensor([448.0, 448.0, 0.0, 448.0, 448.0])).all()
    error = (y.float() * scale - x).abs()
    assert (error <= HALF_STEP * x.abs() + 2.0**-10 * scale).all()


def test_the_product_is_that_of_the_stored_numbers() -> None:
    x, weight, bias = normal(7, 96), normal(40, 96, seed=1), normal(40, seed=2)
    (x8, x_scale), (w8, w_scale) = fp8.quantize_rows(x), fp8.quantize_rows(weight)
    found = fp8.linear_fp8({"in_size": 96, "out_size": 40, "dtype": "float32"})(
        x8, x_scale, w8, w_scale, bias
    )
    exact = (x8.double() * x_scale.double()) @ (w8.double() * w_scale.double()).T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    plain = x.double() @ weight.double().T + bias.double()
    assert 0.005 < (found - plain).norm() / plain.norm() < 0.05  # 2.7 % of each factor, two of them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_ops_are_their_parts_one_after_another(dtype: torch.dtype) -> None:
    problem = {"size": 48, "dtype": str(dtype).removeprefix("torch.")}
    x, residual, weight = (normal(*shape).to(dtype) for shape in ((6, 48), (6, 48), (48,)))
    y, scale, total = fp8.add_rms_norm_fp8(problem)(x, residual.clone(), weight, 1e-6)
    plain, plain_total = norm.add_rms_norm(problem)(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, plain_total)
    for found, wanted in zip((y, scale), fp8.quantize_rows(plain), strict=True):
        assert torch.equal(found.float(), wanted.float())
    both = normal(6, 96).to(dtype)
    for found, wanted in zip(
        fp8.silu_mul_fp8(problem)(both),
        fp8.quantize_rows(activation.silu_mul(problem)(both)),
        strict=True,
    ):
        assert torch.equal(found.float(), wanted.float())


def test_a_layer_holds_each_projection_in_eight_bits_with_a_scale_a_row() -> None:
    build = QuantizedBuild(FP8_METHOD, torch.bfloat16)
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
    whole = torch.cat([stored["p.a.weight"], stored["p.b.weight"]]).to(torch.bfloat16).float()
    assert (
        (linear.weight.float() * linear.scale - whole).abs()
        <= HALF_STEP * whole.abs() + 2e-3 * linear.scale
    ).all()
    x = normal(3, 32, seed=5).to(torch.bfloat16)
    plain = x.float() @ whole.T + torch.cat([stored["p.a.bias"], stored["p.b.bias"]])
    assert (linear(x).float() - plain).norm() / plain.norm() < 0.06


def test_experts_are_products_of_the_stored_numbers_weighed_token_by_token() -> None:
    problem = {
        "num_experts": 6,
        "top_k": 3,
        "hidden_size": 48,
        "intermediate_size": 40,
        "dtype": "float32",
    }
    given = inputs.moe_experts_fp8(
        problem, 9, torch.device("cpu"), torch.Generator().manual_seed(1), strided=True
    )
    found = moe.moe_experts_fp8(problem)(*given.values())
    both, down = (
        given[name].double() * given[f"{name}_scale"].double() for name in ("gate_up", "down")
    )
    codes, scale = fp8.quantize_rows(given["x"])
    for token, x in enumerate(codes.double() * scale.double()):
        total = torch.zeros(48).double()
        for expert, weight in zip(
            given["ids"][token].tolist(), given["weights"][token].tolist(), strict=True
        ):
            gate, up = (both[expert] @ x).chunk(2)
            hidden, hidden_scale = fp8.quantize_rows(
                (torch.nn.functional.silu(gate) * up).float()[None]
            )
            total += weight * (down[expert] @ (hidden.double() * hidden_scale.double())[0])
        torch.testing.assert_close(found[token].double(), total, rtol=1e-4, atol=1e-4)


def test_the_rows_of_no_token_are_no_rows() -> None:
    problem = {
        "num_experts": 6,
        "top_k": 3,
        "hidden_size": 48,
        "intermediate_size": 40,
        "dtype": "float32",
    }
    given = inputs.moe_experts_fp8(
        problem, 0, torch.device("cpu"), torch.Generator(), strided=False
    )
    assert moe.moe_experts_fp8(problem)(*given.values()).shape == (0, 48)


@pytest.mark.parametrize(("spec", "family"), [(LLAMA, "Llama"), (QWEN2, "Qwen2"), (QWEN3, "Qwen3")])
def test_logits_are_near_those_of_the_whole_weights(
    spec: ModelSpec, family: str, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, initializer_range=0.08)
    build = QuantizedBuild(FP8_METHOD)
    module, _, name = spec.load.partition(":")
    model = getattr(importlib.import_module(module), name)(
        json.loads((tmp_path / "config.json").read_text()), build
    )
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    token_ids = torch.randint(0, 100, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        found = sequence_logits(model, build, token_ids)
    error = float((found - expected).norm() / expected.norm())
    assert 0.01 < error < 0.1, "three layers of random weights, each product off by some 4 %"
    asked = {op for op, _ in build.problems}
    assert {"linear_fp8", "quantize_fp8", "add_rms_norm_fp8", "silu_mul_fp8"} <= asked
    heads = [problem for op, problem in build.problems if op == "linear"]
    assert [problem["out_size"] for problem in heads] == [101], "only the head stays as it is"


def test_logits_of_a_mixture_of_experts_are_near_those_of_the_whole_weights(tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, initializer_range=0.08)
    build = QuantizedBuild(FP8_METHOD)
    model = load_target(QWEN3_MOE.load)(json.loads((tmp_path / "config.json").read_text()), build)
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    token_ids = torch.randint(0, 100, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        found = sequence_logits(model, build, token_ids)
    assert 0.01 < float((found - expected).norm() / expected.norm()) < 0.1
    assert "moe_experts_fp8" in {op for op, _ in build.problems}
    whole = [problem["out_size"] for op, problem in build.problems if op == "linear"]
    assert whole == [5, 5, 101], "the routers of two layers and the head stay as they are"


def test_the_server_computes_experts_in_eight_bits_when_it_is_asked_to(tmp_path: Path) -> None:
    save_reference("Qwen3Moe", tmp_path, initializer_range=0.08)
    build = QuantizedBuild(FP8_METHOD)
    model = load_target(QWEN3_MOE.load)(json.loads((tmp_path / "config.json").read_text()), build)
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    prompt, settings = (
        list(range(3, 40)),
        {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 256},
    )
    with LLM(str(tmp_path), quantization="fp8", **settings) as llm:
        asked = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        answer = llm.generate([{"prompt_token_ids": prompt}], asked)[0].outputs[0]
        assert {planned.backend for planned in llm.kernel_plan.find("moe_experts_fp8")} == {"torch"}
    expected = sequence_logits(model, build, prompt)[-1].log_softmax(dim=-1)
    assert answer.logprobs is not None
    for token, each in answer.logprobs[0].items():
        assert abs(each.logprob - float(expected[token])) < 0.05


def test_dummy_weights_are_made_one_projection_at_a_time_in_the_models_dtype() -> None:
    build = QuantizedBuild(FP8_METHOD, torch.bfloat16)
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
    model = load_target(QWEN3.load)(config, build)
    given = dict(read_dummy("", model, lambda done, total: None))
    assert {tensor.dtype for tensor in given.values()} == {torch.bfloat16}
    assert given["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    model.load_weights(given.items())
    held = model.layers[0].attention.qkv
    assert torch.allclose(
        held.weight[:32].float() * held.scale[:32],
        given["model.layers.0.self_attn.q_proj.weight"].float(),
        rtol=HALF_STEP,
        atol=1e-3,
    )


def test_an_unknown_method_is_refused_with_those_that_are_installed() -> None:
    config = Config.from_keywords(quantization="fp9")
    with pytest.raises(
        PluginError, match=r"no quantization named 'fp9'; installed: .*fp8.*; did you mean fp8\?"
    ):
        resolve(config, discover(config))


def test_a_model_with_experts_is_refused_by_the_name_of_what_lacks(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    resolved = tiny(hf_overrides={"architectures": ["Qwen3MoeForCausalLM"], **experts})
    with pytest.raises(CheckpointError, match="--quantization other"):
        plan_only(replace(resolved, quantization=OTHER), catalog)


def test_a_method_that_a_family_does_not_ask_for_is_refused(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    resolved = replace(tiny(), quantization=OTHER)
    plan, memory = plan_only(resolved, catalog)
    assert plan.find("linear_fp8")
    assert not plan.find("silu_mul_fp8")
    assert memory["weight_bytes"] is None
    spec = ModelSpec("Qwen3ForCausalLM", "", f"{__name__}:NoLinears")
    with pytest.raises(
        CheckpointError, match="has no effect: Qwen3ForCausalLM does not use linear_fp8"
    ):
        plan_only(replace(resolved, checkpoint=replace(resolved.checkpoint, spec=spec)), catalog)


class NoLinears:
    """A family that computes its linear maps in a way of its own."""

    def __init__(self, config: object, build: object) -> None:
        del config, build


def test_a_dry_run_shows_the_kernels_of_the_method() -> None:
    report = dry_run(Config.from_keywords(quantization="fp8", device="cpu"))
    assert "quantization: fp8" in report
    assert "weight_bytes: known after start" in report
    assert "linear_fp8" in report


STORED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def store_quantized(folder: Path, **changes: Any) -> None:
    """Quantise a checkpoint on disk as compressed-tensors writes it: weights of e4m3, scales [O, 1] in bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**STORED, **changes}})
    )
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = (tensor.abs().amax(dim=1, keepdim=True) / 448).to(torch.bfloat16)
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensor / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")


def test_a_checkpoint_that_is_quantised_already_is_read_as_it_is(tmp_path: Path) -> None:
    reference = save_reference("Qwen3", tmp_path, initializer_range=0.08)
    store_quantized(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert load_target(QWEN3.describe)(config).quantization == "fp8"
    build = QuantizedBuild(FP8_METHOD)
    model = load_target(QWEN3.load)(config, build)
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    stored = load_file(tmp_path / "model.safetensors")
    held, name = model.layers[1].attention.qkv, "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(held.weight[:64].float(), stored[name].float())
    assert torch.equal(held.scale[:64], stored[f"{name}_scale"].float())
    token_ids = list(range(3, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        found = sequence_logits(model, build, token_ids)
    assert (found - expected).norm() / expected.norm() < 0.15


def test_experts_that_are_quantised_already_are_read_beside_routers_that_are_not(
    tmp_path: Path,
) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, initializer_range=0.08)
    store_quantized(tmp_path, ignore=["lm_head", "re:.*mlp.gate$"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert load_target(QWEN3_MOE.describe)(config).quantization == "fp8"
    build = QuantizedBuild(FP8_METHOD)
    model = load_target(QWEN3_MOE.load)(config, build)
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    stored = load_file(tmp_path / "model.safetensors")
    moe_layer, name = model.layers[1].mlp, "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(moe_layer.gate_up[3, 24:].float(), stored[name].float())
    assert torch.equal(moe_layer.router.weight, stored["model.layers.1.mlp.gate.weight"])
    token_ids = list(range(3, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        found = sequence_logits(model, build, token_ids)
    assert (found - expected).norm() / expected.norm() < 0.15


def test_a_checkpoint_that_quantises_its_head_is_refused_with_what_is_served(
    tmp_path: Path,
) -> None:
    save_reference("Qwen3", tmp_path)
    store_quantized(tmp_path, ignore=["re:.*mlp.gate$"])
    with pytest.raises(
        ValueError, match=r"served are checkpoints of compressed-tensors that hold every Linear but"
    ):
        load_target(QWEN3.describe)(json.loads((tmp_path / "config.json").read_text()))


def test_packed_weights_without_scales_and_scales_without_packed_weights_are_named() -> None:
    linear = Linear(
        QuantizedBuild(FP8_METHOD), 16, (Projection("a", 4, None), Projection("b", 4, None))
    )
    packed, scale = fp8.quantize_rows(normal(4, 16))
    given = {"a.weight": packed, "b.weight": normal(4, 16), "b.weight_scale": scale}
    with pytest.raises(ValueError, match=r"missing: a.weight_scale; unexpected: b.weight_scale"):
        WeightMap(linear.slots("")).load(given.items())
    whole = Linear(DenseBuild(), 16, (Projection("a", 4, None),))
    with pytest.raises(
        ValueError, match=r"unexpected: a.weight_scale; a.weight is torch.float8_e4m3fn"
    ):
        WeightMap(whole.slots("")).load({"a.weight": packed, "a.weight_scale": scale}.items())


def test_the_engine_takes_the_method_from_the_checkpoint_and_refuses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference("Qwen3", tmp_path)
    store_quantized(tmp_path)
    config = Config.from_keywords(model=str(tmp_path), skip_tokenizer_init=True)
    catalog = discover(config)
    assert resolve(config, catalog).quantization == FP8_METHOD
    with pytest.raises(ConfigError, match=r"--quantization fp4: .* fp8"):
        resolve(Config.from_keywords(model=str(tmp_path), quantization="fp4"), catalog)
