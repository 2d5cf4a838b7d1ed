"""A tiny random float32 checkpoint of each family, with its transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "Mistral": {"sliding_window": 9},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
    },
    "Gemma3": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "rope_theta": 500.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "Phi3": {"sliding_window": 9, "rope_parameters": {"partial_rotary_factor": 0.75}},
    "Olmo2": {"rope_parameters": {"rope_theta": 500.0}},
    "Olmo3": {
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "Mixtral": {"num_local_experts": 5},
    "Glm4Moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "Llama4": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 24,
        "intermediate_size_mlp": 56,
        "num_local_experts": 5,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 9,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "MiniMaxM2": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "GptOss": {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "swiglu_limit": 2.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 150000.0,
            "truncate": False,
        },
    },
    "DeepseekV2": {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "Glm4MoeLite": {
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "v_head_dim": 28,
        "n_group": 1,
        "topk_group": 1,
    },
}

# Families with experts, and the keys that give those a number of experts that processes can divide.
EXPERTS = (
    "Qwen3Moe",
    "Mixtral",
    "Glm4Moe",
    "Llama4",
    "MiniMaxM2",
    "GptOss",
    "DeepseekV2",
    "DeepseekV3",
    "Glm4MoeLite",
)
EIGHT_EXPERTS = {
    "Qwen3Moe": {"num_experts": 8},
    "Mixtral": {"num_local_experts": 8},
    "GptOss": {"num_local_experts": 8},
    "Llama4": {"num_local_experts": 8},
}


def save_reference(family: str, folder: Path, **changes: Any) -> Any:
    """Write a checkpoint and return its transformers model. `changes` override the configuration."""
    torch.manual_seed(11)
    model = getattr(transformers, f"{family}ForCausalLM")
    values = {**SMALL, **FAMILIES.get(family, {}), **changes}
    # "sdpa" has no soft caps, and some versions of transformers choose it anyway.
    reference = model(model.config_class(**values, attn_implementation="eager")).eval()
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    reference.save_pretrained(folder)
    return reference
