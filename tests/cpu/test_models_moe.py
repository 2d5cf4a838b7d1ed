"""Mixtral, GLM-4.5 and MiniMax-M2: published configurations, both layouts of experts, and bad checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_grained import SIZES, STORED, store
from quantized_build import (
    QuantizedBuild,
    UnquantizedExperts,
    checkpoint_logits,
    load,
    relative,
    transformers_logits,
)
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, SMALL, save_reference
from tokenspeed_models_deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from tokenspeed_models_glm import GLM4_MOE
from tokenspeed_models_glm.describe import describe_glm4_moe
from tokenspeed_models_minimax import MINIMAX_M2
from tokenspeed_models_minimax.describe import describe_minimax_m2
from tokenspeed_models_mistral import MIXTRAL
from tokenspeed_models_mistral.describe import describe_mixtral
from tokenspeed_models_transformers import TRANSFORMERS
from tokenspeed_quantization.schemes import FP8_BLOCK
from torch import Tensor

from tokenspeed_core import LLM
from tokenspeed_core.api import FullAttention
from tokenspeed_core.errors import CheckpointError
from tokenspeed_models.describe import describe_qwen3_moe
from tokenspeed_models.descriptors import QWEN3_MOE
from tokenspeed_models.testing import DenseBuild

MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
GLM_45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
GLM_45_AIR = {
    **GLM_45,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "use_qk_norm": False,
}
MINIMAX_M2_CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "auto_map": {
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
PUBLISHED = [
    pytest.param(describe_mixtral, MIXTRAL_8X7B, 46.7, id="Mixtral 8x7B"),
    pytest.param(describe_glm4_moe, GLM_45, 352.8, id="GLM-4.5"),
    pytest.param(describe_glm4_moe, GLM_45_AIR, 106.9, id="GLM-4.5-Air"),
    pytest.param(describe_minimax_m2, MINIMAX_M2_CONFIG, 228.7, id="MiniMax-M2"),
]
SPECS = {
    "Mixtral": MIXTRAL,
    "Glm4Moe": GLM4_MOE,
    "MiniMaxM2": MINIMAX_M2,
    "DeepseekV2": DEEPSEEK_V2,
    "DeepseekV3": DEEPSEEK_V3,
    "Glm4MoeLite": GLM4_MOE_LITE,
    "Qwen3Moe": QWEN3_MOE,
}


@pytest.mark.parametrize(("describe", "config", "billions"), PUBLISHED)
def test_published_configurations_are_described(
    describe: Callable[[dict[str, Any]], Any], config: dict[str, Any], billions: float
) -> None:
    info = describe(config)
    assert info.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert info.cache_groups == (FullAttention("full", config["num_hidden_layers"], 8, 128),)
    assert info.max_model_len == config["max_position_embeddings"]


def save_stacked(reference: Any, folder: Path) -> None:
    """Write a transformers model's weights under their names there, with all experts of a layer in one tensor."""
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", SPECS)
def test_stacked_experts_load_under_names_of_modules(family: str, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path)
    save_stacked(reference, tmp_path)
    found = checkpoint_logits(SPECS[family], tmp_path, DenseBuild())
    torch.testing.assert_close(found, transformers_logits(reference), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "expert", "router"),
    [
        (
            "Mixtral",
            "block_sparse_moe.experts.3.w1.weight",
            "block_sparse_moe.gate.weight",
        ),
        ("Glm4Moe", "mlp.experts.3.gate_proj.weight", "mlp.gate.weight"),
        ("DeepseekV3", "mlp.experts.3.down_proj.weight", "mlp.gate.e_score_correction_bias"),
        (
            "MiniMaxM2",
            "block_sparse_moe.experts.3.w2.weight",
            "block_sparse_moe.e_score_correction_bias",
        ),
    ],
)
def test_bad_checkpoint_is_refused_in_one_line(
    family: str, expert: str, router: str, tmp_path: Path
) -> None:
    save_reference(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert, router = f"model.layers.1.{expert}", f"model.layers.2.{router}"
    del tensors[expert]
    tensors[router] = tensors[router][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)
    message = str(caught.value)
    assert f"missing: {expert}" in message
    assert f"{router} has shape" in message
    assert "\n" not in message


def test_layer_for_multi_token_prediction_is_not_read(tmp_path: Path) -> None:
    reference = save_reference("Glm4Moe", tmp_path, num_mtp_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(24, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    found = checkpoint_logits(GLM4_MOE, tmp_path, DenseBuild())
    torch.testing.assert_close(found, transformers_logits(reference), rtol=1e-4, atol=1e-4)
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        load(GLM4_MOE, tmp_path, DenseBuild())


class UpFirst:
    """Experts with the up projection before the gate in the first weight, as some libraries need it."""

    def __init__(self, experts: Callable[..., Tensor]) -> None:
        self._experts, self.num_prepared = experts, 0

    def prepare_weights(self, gate_up: Tensor, down: Tensor) -> None:
        self.num_prepared += 1
        gate_up.copy_(swapped(gate_up))

    def __call__(self, x: Tensor, gate_up: Tensor, *others: Tensor) -> Tensor:
        return self._experts(x, swapped(gate_up), *others)


def swapped(weight: Tensor) -> Tensor:
    """Return a weight [E, 2I, N] with its halves exchanged."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


class UpFirstBuild(DenseBuild):
    """A build with such experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: list[UpFirst] = []

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        kernel = super().op(op, **problem)
        if op != "moe_experts":
            return kernel
        self.experts.append(UpFirst(kernel))
        return self.experts[-1]


@pytest.mark.parametrize("is_stacked", [False, True], ids=["single", "stacked"])
def test_kernels_prepare_the_loaded_experts_once(is_stacked: bool, tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path)
    expected = checkpoint_logits(QWEN3_MOE, tmp_path, DenseBuild())
    if is_stacked:
        save_stacked(reference, tmp_path)
    build = UpFirstBuild()
    torch.testing.assert_close(checkpoint_logits(QWEN3_MOE, tmp_path, build), expected)
    assert [each.num_prepared for each in build.experts] == [1, 1]


def test_kernels_with_own_layout_are_refused_in_transformers(tmp_path: Path) -> None:
    save_reference("Qwen3Moe", tmp_path)
    with pytest.raises(ValueError, match="Choose another --moe-backend"):
        load(TRANSFORMERS, tmp_path, UpFirstBuild())


def minimax_fp8(folder: Path) -> Any:
    """Write a checkpoint like the published ones, and return its dequantized transformers model."""
    sizes = {**SIZES, "intermediate_size": 128}
    reference = save_reference("MiniMaxM2", folder, **sizes)
    ignored = MINIMAX_M2_CONFIG["quantization_config"]["modules_to_not_convert"]
    settings = {**STORED, "fmt": "float8_e4m3fn", "modules_to_not_convert": ignored}
    store(folder, reference, settings=settings)
    return reference


def test_block_wise_fp8_checkpoint_equals_transformers(tmp_path: Path) -> None:
    reference = minimax_fp8(tmp_path)
    dequantized = transformers_logits(reference)
    found = checkpoint_logits(MINIMAX_M2, tmp_path, UnquantizedExperts())
    assert relative(found, dequantized) < 1e-5
    quantized_too = checkpoint_logits(MINIMAX_M2, tmp_path, QuantizedBuild(FP8_BLOCK))
    assert 0.01 < relative(quantized_too, dequantized) < 0.3


SCALE = "model.layers.1.block_sparse_moe.experts.2.w3.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: None, f"missing: {SCALE}"),
        (lambda scale: scale[:, :1], rf"{SCALE} has shape \[1, 1\], expected \[1, 2\]"),
    ],
    ids=["missing", "truncated"],
)
def test_wrong_scale_of_an_expert_is_named(
    change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    minimax_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(SCALE))
    if changed is not None:
        tensors[SCALE] = changed.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(MINIMAX_M2, tmp_path, QuantizedBuild(FP8_BLOCK))


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Glm4Moe", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("Glm4Moe", {"n_group": 3}, "1 of 3 groups of 8 experts"),
        ("Glm4Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ("MiniMaxM2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ("MiniMaxM2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("MiniMaxM2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("Mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        (
            "Qwen3Moe",
            {"num_local_experts": 3, "num_experts": 4},
            "num_local_experts is 3 and num_experts is 4",
        ),
    ],
)
def test_unsupported_value_is_named_by_its_key(
    family: str, changes: dict[str, Any], expected: str
) -> None:
    describe = {
        "Mixtral": describe_mixtral,
        "Glm4Moe": describe_glm4_moe,
        "MiniMaxM2": describe_minimax_m2,
        "Qwen3Moe": describe_qwen3_moe,
    }[family]
    config = {**SMALL, **FAMILIES[family]}
    describe(config)
    with pytest.raises(ValueError, match=expected):
        describe({**config, **changes})
