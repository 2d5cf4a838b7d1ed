"""A tiny random float32 checkpoint of each architecture that the tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e3,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [3.0, 3.2, 3.4, 3.6],
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# Architectures that no family supports.
MODELS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": WINDOWS,
    # A rotary embedding for each type of layer.
    "cohere_compass_text": WINDOWS
    | {"rope_parameters": {kind: {"rope_theta": 1e3} for kind in WINDOWS["layer_types"]}},
    "diffllama": {},
    # A layer that runs twice, and an output head with scales.
    "dory": {
        "head_dim": 8,
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": EXPERTS,
    "ernie4_5": {},
    "exaone4": WINDOWS,
    # Two layers that share the keys and values of others.
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # Has a mask for tokens of images.
    "gemma4_unified": {
        "text_config": SMALL | WINDOWS | {"head_dim": 8, "global_head_dim": 16, "pad_token_id": 0},
    },
    "glm": {"head_dim": 8},
    "gpt2": {},
    "gpt_neox": {},
    "granite_swa": {},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "granitemoe": {},
    "helium": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "minicpm3": LATENT,
    "nemotron": {},
    "olmo": {"clip_qkv": 3.0},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 9},
}
# More of them, for the release checks.
MORE: dict[str, dict[str, Any]] = {
    "afmoe": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        **WINDOWS,
    },
    "biogpt": {},
    "codegen": {"rotary_dim": 4},
    "ctrl": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **WINDOWS,
    },
    "flex_olmo": {},
    "glm4": {"head_dim": 8},
    "got_ocr2": {
        "text_config": {**SMALL, "model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_channels": 8,
            "image_size": 32,
            "global_attn_indexes": [0],
            "mlp_dim": 16,
        },
    },
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
    },
    "granitemoeshared": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "internlm3": {},
    "jais2": {},
    "ministral3": {"head_dim": 8},
    "modernbert-decoder": {"pad_token_id": 0, "local_attention": 16},
    "nanochat": {},
    "phimoe": {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.4}},
    "sarvam_moe": EXPERTS,
    "vaultgemma": {"head_dim": 8, "attn_logit_softcapping": 2.0} | WINDOWS,
}
# Native ones, as a cross-check.
NATIVE: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | EXPERTS,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 2.0} | WINDOWS,
    "gemma3_text": WINDOWS,
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT | EXPERTS,
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4} | WINDOWS,
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "mixtral": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2},
}
# Tokens of a prompt see later ones.
BIDIRECTIONAL: dict[str, dict[str, Any]] = {"hrm_text": {}}
ALL = MODELS | MORE | NATIVE | BIDIRECTIONAL


def save_reference(model_type: str, folder: Path, **changes: Any) -> Any:
    """Write a checkpoint and return its transformers model. `changes` override the configuration.

    Norms, biases and scales are random too: models initialize them with constants, which hide a missing one.
    Attention is the formula in PyTorch: before 5.21, transformers' SDPA ignores the soft cap of VaultGemma.
    """
    torch.manual_seed(11)
    config = CONFIG_MAPPING[model_type](**{**SMALL, **ALL[model_type], **changes})
    reference = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    reference.save_pretrained(folder)
    return reference
