"""Published configurations of quantized models get kernels, and tensors in their layout load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import Stored
from quantized_build import TOKENS, transformers_logits
from quantized_forms import by_compressed_tensors
from safetensors.torch import load_file, save_file
from test_models_deepseek import BLOCK_WISE, GLM_47_FLASH, K2, V3
from test_models_moe import GLM_45, MINIMAX_M2_CONFIG
from tiny_families import save_reference
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.engine.planning import plan_kernels
from tokenspeed_core.kernels.plan import KernelPlan

UNQUANTIZED = ("linear_silu_mul", "linear_add")  # of shared experts
LAYERS = 5  # of the planned models, with a dense layer and a layer with experts in each
# Kimi K2 Thinking and K2.5
EXPERTS_INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "text_config": {**K2, "quantization_config": EXPERTS_INT4},
    "vision_config": {"patch_size": 14},
}
# MiniMax-M2.5 by AutoAWQ
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["self_attn", "block_sparse_moe.gate", "model.layers.0."],
}
MINIMAX_M25_AWQ = {**MINIMAX_M2_CONFIG, "quantization_config": AWQ}
# What llm-compressor writes for the scheme MXFP4A16
MXFP4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
# GLM-4.6-FP8, whose `ignore` lists every router by name
PER_CHANNEL: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": True,
                "num_bits": 8,
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "num_bits": 8,
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3, 92))],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GLM_47_FLASH_FP8 = {**PER_CHANNEL, "ignore": ["lm_head", "re:.*mlp\\.gate$"]}
# `hf_quant_config.json` of nvidia/DeepSeek-V3-0324-NVFP4: attention, routers and the draft layer are not quantized
NVFP4_EXPERTS: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.27.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": [
            "lm_head",
            "model.embed_tokens",
            "model.norm",
            "model.layers.61*",
            *(f"model.layers.{layer}.self_attn*" for layer in range(61)),
            *(f"model.layers.{layer}.input_layernorm" for layer in range(61)),
            *(f"model.layers.{layer}.mlp.gate" for layer in range(3, 61)),
        ],
    },
}
# `hf_quant_config.json` of nvidia/Qwen3-30B-A3B-NVFP4 and others of its kind
NVFP4_LAYERS = {
    **NVFP4_EXPERTS,
    "quantization": {**NVFP4_EXPERTS["quantization"], "exclude_modules": ["lm_head", "*.mlp.gate"]},
}


def layers_of(plan: KernelPlan) -> dict[str, list[int]]:
    """Return the layers of each op of experts and of quantized linear layers."""
    found: dict[str, set[int]] = {}
    for planned in plan.ops:
        if planned.op.startswith(("linear_", "moe_experts")) and planned.op not in UNQUANTIZED:
            assert not planned.is_reference
            found.setdefault(planned.op, set()).update(planned.layers)
    return {op: sorted(layers) for op, layers in found.items() if layers}


@pytest.mark.parametrize(
    ("config", "quantization_file", "expected"),
    [
        pytest.param(
            {**V3, "quantization_config": BLOCK_WISE},
            None,
            {"linear_fp8_block": [0, 1, 2, 3, 4], "moe_experts_fp8_block": [3, 4]},
            id="DeepSeek-V3.1",
        ),
        pytest.param(
            V3,
            NVFP4_EXPERTS,
            {"linear_nvfp4": [0, 1, 2, 3, 4], "moe_experts_nvfp4": [3, 4]},
            id="DeepSeek-V3 in NVFP4",
        ),
        pytest.param(
            {**K2, "quantization_config": EXPERTS_INT4},
            None,
            {"moe_experts_w4a16": [1, 2, 3, 4]},
            id="Kimi K2 Thinking",
        ),
        pytest.param(K25, None, {"moe_experts_w4a16": [1, 2, 3, 4]}, id="Kimi K2.5"),
        pytest.param(
            K25,
            NVFP4_LAYERS,
            {"linear_nvfp4": [0, 1, 2, 3, 4], "moe_experts_nvfp4": [1, 2, 3, 4]},
            id="Kimi K2.5 in NVFP4",
        ),
        pytest.param(
            {**GLM_45, "quantization_config": MXFP4},
            None,
            {"linear_mxfp4": [0, 1, 2, 3, 4], "moe_experts_mxfp4": [3, 4]},
            id="GLM-4.5 in MXFP4",
        ),
        pytest.param(
            {**GLM_45, "quantization_config": PER_CHANNEL},
            None,
            {"linear_fp8": [0, 1, 2, 3, 4], "moe_experts_fp8": [3, 4]},
            id="GLM-4.6-FP8",
        ),
        pytest.param(
            {**GLM_47_FLASH, "quantization_config": GLM_47_FLASH_FP8},
            None,
            {"linear_fp8": [0, 1, 2, 3, 4], "moe_experts_fp8": [1, 2, 3, 4]},
            id="GLM-4.7-Flash in FP8",
        ),
        pytest.param(
            MINIMAX_M2_CONFIG,
            None,
            {"linear_fp8_block": [0, 1, 2, 3, 4], "moe_experts_fp8_block": [0, 1, 2, 3, 4]},
            id="MiniMax-M2",
        ),
        pytest.param(
            MINIMAX_M25_AWQ,
            None,
            {"moe_experts": [0], "moe_experts_w4a16": [1, 2, 3, 4]},
            id="MiniMax-M2.5-AWQ",
        ),
    ],
)
def test_quantized_layers_have_kernels(
    config: dict[str, Any],
    quantization_file: dict[str, Any] | None,
    expected: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    text = {**config.get("text_config", config), "num_hidden_layers": LAYERS}
    if "attn_type_list" in text:
        text["attn_type_list"] = text["attn_type_list"][:LAYERS]
    short = {**config, "text_config": text} if "text_config" in config else text
    (tmp_path / "config.json").write_text(json.dumps(short))
    if quantization_file is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization_file))
    capability = (9, 0) if quantization_file is None else (10, 0)
    platform = PlatformInfo("cuda", capability, "another device")
    _, plan = plan_kernels(
        ServerConfig(model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy"), platform
    )
    assert {dict(each.problem)["dtype"] for each in plan.find("attention")} == {"bfloat16"}
    assert layers_of(plan) == expected


def save_kimi_k25(folder: Path) -> Any:
    """Write a checkpoint in the layout of Kimi K2.5, and return transformers' model of the same values."""
    sizes = {"moe_intermediate_size": 32, "initializer_range": 0.1}
    reference = save_reference("DeepseekV3", folder, **sizes)
    _, quantize = by_compressed_tensors(
        "pack-quantized", EXPERTS_INT4["config_groups"]["group_0"]["weights"]
    )
    stored: Stored = {"vision_tower.patch_embed.proj.weight": torch.zeros(4)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            stored[f"language_model.{name}"] = tensor
            continue
        parts, values = quantize(tensor)
        layer = f"language_model.{name.removesuffix('.weight')}"
        stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
        module, expert, projection, _ = name.rsplit(".", 3)
        is_down = projection == "down_proj"
        stacked = reference.get_parameter(f"{module}.{'down_proj' if is_down else 'gate_up_proj'}")
        weight = stacked.data[int(expert)]
        if not is_down:
            weight = weight.chunk(2)[projection == "up_proj"]
        weight.copy_(values)
    save_file(stored, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    text["quantization_config"] = EXPERTS_INT4
    (folder / "config.json").write_text(
        json.dumps({**K25, "dtype": "float32", "text_config": text})
    )
    return reference


def test_kimi_k25_with_int4_experts_is_served(tmp_path: Path) -> None:
    reference = save_kimi_k25(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    expert = "language_model.model.layers.1.mlp.experts.0.gate_proj"
    assert {f"{expert}.{part}" for part in ("weight_packed", "weight_scale")} <= set(names)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_total_tokens=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        tokens = llm.generate({"prompt_token_ids": TOKENS}, params)[0].outputs[0].token_ids
        assert llm.kernel_plan.find("moe_experts_w4a16")
    logits = transformers_logits(reference, [*TOKENS, *tokens])[len(TOKENS) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() <= 1e-4
