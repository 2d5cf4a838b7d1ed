"""Make the training code importable; it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from demo_training.deepseek_v3 import DeepseekV3Config


@pytest.fixture
def tiny_deepseek() -> DeepseekV3Config:
    """Sizes that a CPU trains in a second."""
    from demo_training.deepseek_v3 import DeepseekV3Config

    return DeepseekV3Config(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
