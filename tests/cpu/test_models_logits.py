"""Each family gives the logits of transformers for the same random checkpoint."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenspeed_models_deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from tokenspeed_models_gemma import GEMMA2, GEMMA3
from tokenspeed_models_glm import GLM4_MOE
from tokenspeed_models_gpt_oss import GPT_OSS
from tokenspeed_models_llama4 import LLAMA4
from tokenspeed_models_minimax import MINIMAX_M2
from tokenspeed_models_mistral import MISTRAL, MIXTRAL
from tokenspeed_models_olmo import OLMO2, OLMO3
from tokenspeed_models_phi import PHI3

from tokenspeed_core.api import ModelSpec
from tokenspeed_models.descriptors import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
}
MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GPT: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_local_experts": 5,
    "attention_chunk_size": 7,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
GLM: dict[str, Any] = {
    "head_dim": 16,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
MINIMAX: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
LAYER_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.0, 3.0, 9.0],
}

CASES: list[tuple[str, ModelSpec, str, dict[str, Any]]] = [
    ("llama", LLAMA, "Llama", {}),
    (
        "llama-one-kv-head-per-head",
        LLAMA,
        "Llama",
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    ),
    (
        "llama-tied-with-biases",
        LLAMA,
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    ),
    ("llama-linear", LLAMA, "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    ("llama-dynamic", LLAMA, "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    ("llama-llama3", LLAMA, "Llama", {"rope_parameters": LLAMA3}),
    ("qwen2", QWEN2, "Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen2-yarn", QWEN2, "Qwen2", {"rope_parameters": YARN}),
    (
        "qwen2-windows-in-upper-layers",
        QWEN2,
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    ("qwen3", QWEN3, "Qwen3", {"head_dim": 16}),
    (
        "qwen3-tied-with-biases",
        QWEN3,
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    (
        "qwen3-yarn-untruncated",
        QWEN3,
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    ("qwen3-moe", QWEN3_MOE, "Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    (
        "qwen3-moe-partly-dense",
        QWEN3_MOE,
        "Qwen3Moe",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    (
        "qwen3-moe-window",
        QWEN3_MOE,
        "Qwen3Moe",
        {**MOE, "use_sliding_window": True, "sliding_window": 6},
    ),
    ("gpt-oss", GPT_OSS, "GptOss", {**GPT, "rope_parameters": {**YARN, "truncate": False}}),
    (
        "gpt-oss-defaults",
        GPT_OSS,
        "GptOss",
        {**GPT, "swiglu_limit": 7.0, "swiglu_alpha": 1.1, "num_hidden_layers": 4},
    ),
    ("deepseek-v2", DEEPSEEK_V2, "DeepseekV2", DEEPSEEK),
    (
        "deepseek-v2-groups-yarn",
        DEEPSEEK_V2,
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": 24,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    (
        "deepseek-v3-yarn",
        DEEPSEEK_V3,
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": 24, "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0}},
    ),
    (
        "deepseek-v3-direct-queries",
        DEEPSEEK_V3,
        "DeepseekV3",
        {**DEEPSEEK, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    (
        "glm-4.7-flash",
        GLM4_MOE_LITE,
        "Glm4MoeLite",
        {**DEEPSEEK, "q_lora_rank": 24, "v_head_dim": 36, "n_group": 1, "topk_group": 1},
    ),
    (
        "glm-4.7-flash-dense-layers-and-biases",
        GLM4_MOE_LITE,
        "Glm4MoeLite",
        {
            **DEEPSEEK,
            "q_lora_rank": 24,
            "attention_bias": True,
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    ("gemma2", GEMMA2, "Gemma2", GEMMA),
    (
        "gemma2-one-rotation-per-head",
        GEMMA2,
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "rope_parameters": {"rope_theta": 300.0}},
    ),
    (
        "gemma3",
        GEMMA3,
        "Gemma3",
        {**GEMMA, "attn_logit_softcapping": None, "rope_parameters": LAYER_ROPES},
    ),
    (
        "gemma3-pattern-and-older-rope",
        GEMMA3,
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_local_base_freq": 100.0,
            "rope_theta": 500.0,
        },
    ),
    ("phi3", PHI3, "Phi3", {}),
    ("phi3-window-partial", PHI3, "Phi3", {"sliding_window": 5, "partial_rotary_factor": 0.5}),
    (
        "phi3-short-factors",
        PHI3,
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
            "rope_scaling": LONGROPE,
        },
    ),
    (
        "phi3-long-factors",
        PHI3,
        "Phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_scaling": {
                **LONGROPE,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.5, 3.0, 5.0, 8.0, 13.0],
            },
        },
    ),
    ("olmo2", OLMO2, "Olmo2", {"rope_parameters": {"rope_theta": 500.0}}),
    ("olmo2-biases", OLMO2, "Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    ("olmo3", OLMO3, "Olmo3", {"num_hidden_layers": 4, "sliding_window": 5}),
    (
        "olmo3-yarn-in-full-layers",
        OLMO3,
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 5, "rope_theta": 500.0, "rope_scaling": YARN},
    ),
    ("glm-4.5", GLM4_MOE, "Glm4Moe", {**GLM, "use_qk_norm": True}),
    (
        "glm-4.5-groups-without-qk-norm",
        GLM4_MOE,
        "Glm4Moe",
        {
            **GLM,
            "attention_bias": False,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
        },
    ),
    ("llama-4-scout", LLAMA4, "Llama4", {**LLAMA_4, "rope_parameters": LLAMA3}),
    ("llama-4-yarn", LLAMA4, "Llama4", {**LLAMA_4, "rope_parameters": YARN}),
    (
        "llama-4-yarn-without-norms",
        LLAMA4,
        "Llama4",
        {**LLAMA_4, "rope_parameters": YARN, "use_qk_norm": False},
    ),
    (
        "llama-4-maverick",
        LLAMA4,
        "Llama4",
        {**LLAMA_4, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    ),
    (
        "llama-4-without-growth",
        LLAMA4,
        "Llama4",
        {**LLAMA_4, "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0]},
    ),
    ("minimax-m2", MINIMAX_M2, "MiniMaxM2", MINIMAX),
    ("mixtral", MIXTRAL, "Mixtral", {"num_local_experts": 5}),
    (
        "mixtral-window",
        MIXTRAL,
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 6},
    ),
    ("mistral-window", MISTRAL, "Mistral", {"sliding_window": 5}),
    (
        "mistral-open",
        MISTRAL,
        "Mistral",
        {"sliding_window": None, "head_dim": 20, "tie_word_embeddings": True},
    ),
]


def save_reference(family: str, changes: dict[str, Any], folder: Path) -> Any:
    """Save a random transformers model as a sharded checkpoint and return it."""
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")
    reference = model(model.config_class(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    reference.save_pretrained(folder, max_shard_size="40KB")
    return reference


@pytest.mark.parametrize(
    ("spec", "family", "changes"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_logits_equal_transformers(
    spec: ModelSpec, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = save_reference(family, changes, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    module, _, name = spec.load.partition(":")
    build = DenseBuild()
    model = getattr(importlib.import_module(module), name)(config, build)
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    token_ids = torch.randint(
        0, SMALL["vocab_size"], (40,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
        torch.testing.assert_close(
            sequence_logits(model, build, token_ids), expected, atol=1e-4, rtol=1e-4
        )
        chunked = sequence_logits(model, build, token_ids, chunk=7)
        for wanted in ([39], [3, 20, 20], []):
            build.clear()
            rows = torch.tensor(wanted, dtype=torch.int64)
            some = model.logits(model.forward(torch.tensor(token_ids), torch.arange(40), rows))
            torch.testing.assert_close(some, expected[rows], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(chunked, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("spec", "family", "changes"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_parameter_count_equals_transformers(
    spec: ModelSpec, family: str, changes: dict[str, Any]
) -> None:
    model = getattr(transformers, f"{family}ForCausalLM")
    config = model.config_class(**{**SMALL, **changes})
    with torch.device("meta"):
        reference = model(config)
    module, _, name = spec.describe.partition(":")
    info = getattr(importlib.import_module(module), name)(config.to_dict())
    assert info.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert info.eos_token_ids == (2, 3)
    assert sum(group.num_layers for group in info.cache_groups) == config.num_hidden_layers
