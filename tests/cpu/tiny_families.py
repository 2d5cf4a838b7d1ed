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
}


def save_reference(family: str, folder: Path, **changes: Any) -> Any:
    """Write a family's checkpoint and return its transformers model. `changes` override the configuration."""
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family], **changes})
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    reference.save_pretrained(folder)
    return reference
