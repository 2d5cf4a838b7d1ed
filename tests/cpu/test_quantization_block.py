"""Linear maps in eight bits with a scale a block: beside transformers' own conversions, from the op to the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_grained import SIZES, STORED, quantize_inputs, quantized, store, values
from quantized_build import QuantizedBuild
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from torch import Tensor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import ModelSpec
from tokenspeed_core.config import Config
from tokenspeed_core.engine.dry_run import dry_run
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_kernels.contracts import FP8_BLOCK_METHOD
from tokenspeed_kernels.reference import activation, fp8_block, norm
from tokenspeed_models.descriptors import LLAMA, QWEN2, QWEN3
from tokenspeed_models.layers import Linear, Projection
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.quantization_config import read_quantization
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightMap

FAMILIES = [
    (LLAMA, "Llama", torch.float32),
    (QWEN2, "Qwen2", torch.float32),
    (QWEN3, "Qwen3", torch.bfloat16),
]
TOKENS = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(3)).tolist()


class WholeActivations(QuantizedBuild):
    """A build whose weights are quantised and whose activations are not."""

    def __init__(self) -> None:
        super().__init__(replace(FP8_BLOCK_METHOD, fused={}))  # whose ops would quantise as well

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        if op == "quantize_fp8_groups":
            return lambda x: (x, torch.ones(x.shape[0], -(-x.shape[1] // 128)))
        return super().op(op, **problem)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(spec: ModelSpec, folder: Path, build: DenseBuild) -> Any:
    model = load_target(spec.load)(json.loads((folder / "config.json").read_text()), build)
    model.load_weights(read_safetensors(str(folder), model, lambda done, total: None))
    return model


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def expected_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def test_weights_and_activations_are_quantised_as_transformers_does() -> None:
    x = normal(256, 384) * torch.logspace(-3, 2, 384)
    for rows, quantize in ((128, fp8_block.quantize_blocks), (1, fp8_block.quantize_groups)):
        codes, scale = quantize(x)
        their_codes, their_scale = quantized(x, rows)
        torch.testing.assert_close(scale, their_scale, rtol=1e-6, atol=0)
        same = codes.view(torch.uint8) == their_codes.view(torch.uint8)
        assert same.float().mean() > 0.999, "but for what lies in the middle of two codes"


def test_each_block_of_a_weight_and_each_group_of_a_row_has_a_scale_of_its_own() -> None:
    weight = torch.zeros(200, 300)
    weight[150, 290], weight[3, 130] = -448.0, 4.48
    codes, scale = fp8_block.quantize_blocks(weight)
    torch.testing.assert_close(scale[1, 2], torch.tensor(1.0))
    torch.testing.assert_close(scale[0, 1], torch.tensor(0.01))
    torch.testing.assert_close(codes.float() * fp8_block.spread_blocks(scale, 200, 300), weight)
    x = torch.ones(2, 200)
    x[1, 190] = 448.0
    torch.testing.assert_close(
        fp8_block.quantize_groups(x)[1], torch.tensor([[1 / 448, 1 / 448], [1 / 448, 1.0]])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_ops_are_their_parts_one_after_another(dtype: torch.dtype) -> None:
    problem = {"size": 200, "dtype": str(dtype).removeprefix("torch.")}
    x, residual, weight = (normal(*shape).to(dtype) for shape in ((6, 200), (6, 200), (200,)))
    *found, total = fp8_block.add_rms_norm_fp8_groups(problem)(x, residual.clone(), weight, 1e-6)
    plain, plain_total = norm.add_rms_norm(problem)(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, plain_total)
    both = normal(6, 400).to(dtype)
    found.extend(fp8_block.silu_mul_fp8_groups(problem)(both))
    expected = (
        *fp8_block.quantize_groups(plain),
        *fp8_block.quantize_groups(activation.silu_mul(problem)(both)),
    )
    for ours, parts in zip(found, expected, strict=True):
        assert torch.equal(ours.float(), parts.float())


def test_the_product_is_that_of_the_numbers_that_transformers_reads() -> None:
    x, weight, bias = (
        normal(7, 256),
        normal(384, 256, seed=1) * torch.logspace(-2, 1, 256),
        normal(384, seed=2),
    )
    (x8, x_scale), (w8, w_scale) = quantized(x, rows=1), quantized(weight)
    problem = {"in_size": 256, "out_size": 384, "dtype": "float32"}
    found = fp8_block.linear_fp8_block(problem)(x8, x_scale, w8, w_scale, bias)
    exact = values(x8, x_scale).double() @ values(w8, w_scale).double().T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert 0.005 < relative(exact, x.double() @ weight.double().T + bias.double()) < 0.05


def test_a_layer_holds_a_scale_for_each_block_of_each_projection() -> None:
    linear = Linear(
        QuantizedBuild(FP8_BLOCK_METHOD, torch.bfloat16),
        256,
        (Projection("a", 256, None), Projection("b", 128, None), Projection("c", 60, None)),
        bias=True,
    )
    assert linear.weight.dtype == torch.float8_e4m3fn
    assert linear.scale is not None
    assert linear.scale.shape == (4, 2)
    weights = {
        name: normal(size, 256, seed=size) * size
        for name, size in (("a", 256), ("b", 128), ("c", 60))
    }
    stored = {f"p.{name}.weight": weight for name, weight in weights.items()}
    biases = {f"p.{name}.bias": torch.zeros(weight.shape[0]) for name, weight in weights.items()}
    WeightMap(linear.slots("p.")).load({**stored, **biases}.items())
    whole = torch.cat(list(weights.values())).to(torch.bfloat16).float()
    assert (
        relative(linear.weight.float() * fp8_block.spread_blocks(linear.scale, 444, 256), whole)
        < 0.04
    )
    x = normal(3, 256, seed=5).to(torch.bfloat16)
    assert relative(linear(x).float(), x.float() @ whole.T) < 0.06


def test_projections_that_would_share_a_block_are_refused_with_their_rows() -> None:
    with pytest.raises(
        ValueError,
        match=r"--quantization fp8-block: k starts at row 192 .*\(q 192 \+ k 64\).* 128",
    ):
        Linear(
            QuantizedBuild(FP8_BLOCK_METHOD),
            256,
            (Projection("q", 192, None), Projection("k", 64, None)),
        )


@pytest.mark.parametrize(("spec", "family", "scales"), FAMILIES)
def test_of_whole_activations_the_logits_are_those_of_the_weights_that_transformers_reads(
    spec: ModelSpec, family: str, scales: torch.dtype, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    before = expected_logits(reference)
    store(tmp_path, reference, scales)
    build = WholeActivations()
    found = sequence_logits(load(spec, tmp_path, build), build, TOKENS)
    expected = expected_logits(reference)
    assert relative(found, expected) < 1e-5
    assert relative(before, expected) > 0.01, "the weights are no longer what they were"


@pytest.mark.parametrize(("spec", "family", "scales"), FAMILIES)
def test_of_quantised_activations_the_logits_are_those_of_transformers_with_its_own_rounding(
    spec: ModelSpec, family: str, scales: torch.dtype, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    store(tmp_path, reference, scales)
    whole = expected_logits(reference)
    quantize_inputs(reference)
    build = QuantizedBuild(FP8_BLOCK_METHOD)
    found = sequence_logits(load(spec, tmp_path, build), build, TOKENS)
    expected = expected_logits(reference)
    assert min(relative(*rows) for rows in zip(found, expected, strict=True)) < 2e-5
    # a value in the middle of two codes may become either, and then all that follows from it is rounded anew
    assert relative(found, expected) < 0.25 * relative(expected, whole)
    assert 0.01 < relative(found, whole) < 0.2


def test_a_served_checkpoint_answers_with_the_logprobs_of_transformers(tmp_path: Path) -> None:
    reference = save_reference("Llama", tmp_path, **SIZES)
    store(tmp_path, reference)
    quantize_inputs(reference)
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_num_seqs=2
    ) as llm:
        answer = llm.generate([{"prompt_token_ids": TOKENS}], asked)[0].outputs[0]
        for op in (
            "quantize_fp8_groups",
            "add_rms_norm_fp8_groups",
            "silu_mul_fp8_groups",
            "linear_fp8_block",
        ):
            assert {planned.backend for planned in llm.kernel_plan.find(op)} == {"torch"}
    with torch.inference_mode():
        logits = reference(torch.tensor([TOKENS + list(answer.token_ids)])).logits[
            0, len(TOKENS) - 1 : -1
        ]
    assert answer.logprobs is not None
    errors = torch.tensor(
        [
            found.logprob - float(row[token])
            for step, row in zip(answer.logprobs, logits.log_softmax(dim=-1), strict=True)
            for token, found in step.items()
        ]
    )
    assert errors.abs().max() < 0.15, (
        "one token at a time, other values lie in the middle of two codes"
    )
    assert errors.abs().mean() < 0.04


def test_quantised_on_load_a_checkpoint_gives_what_its_stored_form_gives(tmp_path: Path) -> None:
    reference = save_reference("Llama", tmp_path, **SIZES)
    whole, stored = QuantizedBuild(FP8_BLOCK_METHOD), QuantizedBuild(FP8_BLOCK_METHOD)
    on_load = load(LLAMA, tmp_path, whole)
    store(tmp_path, reference)
    found = sequence_logits(on_load, whole, TOKENS)
    assert relative(found, sequence_logits(load(LLAMA, tmp_path, stored), stored, TOKENS)) < 0.01


def test_the_server_quantises_on_load_when_it_is_asked_to(tmp_path: Path) -> None:
    save_reference("Llama", tmp_path, **SIZES)
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    report = dry_run(
        Config.from_keywords(model=str(tmp_path), quantization="fp8-block", **settings)
    )
    assert "quantization: fp8-block" in report
    assert "linear_fp8_block" in report
    with LLM(
        str(tmp_path),
        quantization="fp8-block",
        load_format="dummy",
        max_total_tokens=256,
        **settings,
    ) as llm:
        asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert (
            len(llm.generate([{"prompt_token_ids": [5, 6, 7]}], asked)[0].outputs[0].token_ids) == 3
        )


NAME = "model.layers.1.self_attn.q_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: None, f"missing: {NAME}"),
        (lambda scale: scale[:1], rf"{NAME} has shape \[1, 2\], expected \[2, 2\]"),
        (lambda scale: scale.flatten(), rf"{NAME} has shape \[4\], expected \[2, 2\]"),
        (
            lambda scale: scale.to(torch.float8_e5m2),
            f"{NAME} is torch.float8_e5m2, expected a float",
        ),
    ],
    ids=["missing", "truncated", "flat", "of eight bits"],
)
def test_scales_that_are_not_those_of_the_weights_end_the_start_by_name(
    change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    store(tmp_path, save_reference("Llama", tmp_path, **SIZES))
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(NAME))
    save_file(
        {**tensors, **({} if changed is None else {NAME: changed})}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)


def test_a_model_whose_projections_share_a_block_ends_the_start_before_weights_are_read(
    tmp_path: Path,
) -> None:
    save_reference(
        "Llama",
        tmp_path,
        **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96},
    )
    config = Config.from_keywords(
        model=str(tmp_path), quantization="fp8-block", device="cpu", skip_tokenizer_init=True
    )
    with pytest.raises(CheckpointError, match="k_proj starts at row 192"):
        dry_run(config)


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
    ],
)
def test_fine_grained_checkpoints_are_read_by_their_method(changes: dict[str, Any]) -> None:
    assert read_quantization({"quantization_config": {**STORED, **changes}}) == "fp8-block"


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_block_size": [64, 128]},
        {"weight_block_size": None},
        {"activation_scheme": "static"},
        {"scale_fmt": "ue8m0"},
        {"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]},
        {"modules_to_convert": ["embed_tokens"]},
        {"quant_method": "mxfp4"},
        {"fmt": "e5m2"},
    ],
)
def test_other_forms_are_refused_with_those_that_are_served(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"quantization_config is .*: served are .*channel.*weight_block_size \[128",
    ):
        read_quantization({"quantization_config": {**STORED, **changes}})
