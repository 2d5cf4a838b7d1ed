"""Describing checkpoints from config.json, without a tensor library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tokenspeed_models_mistral.describe import describe_mistral

from tokenspeed_core.api import FullAttention, SlidingWindow
from tokenspeed_models.describe import (
    describe_llama,
    describe_qwen2,
    describe_qwen3,
    describe_qwen3_moe,
)

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN3_30B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}


def test_real_configuration_is_described_in_full() -> None:
    info = describe_qwen3_moe(QWEN3_30B)
    assert (info.vocab_size, info.max_model_len, info.dtype, info.num_layers) == (
        151936,
        40960,
        "bfloat16",
        48,
    )
    assert info.num_parameters == 30_532_122_624
    assert info.cache_groups == (FullAttention("full", 48, 4, 128),)
    assert (info.eos_token_ids, info.bos_token_id) == ((151645,), 151643)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({}, "float32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "bfloat16"),
    ],
)
def test_dtype_is_read_from_old_and_new_keys(keys: dict[str, Any], dtype: str) -> None:
    assert describe_llama({**SMALL, **keys}).dtype == dtype


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, ()), (2, (2,)), ([128001, 128009], (128001, 128009))]
)
def test_several_eos_tokens_are_read(eos: object, expected: tuple[int, ...]) -> None:
    assert describe_llama({**SMALL, "eos_token_id": eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("keys", "windowed"),
    [
        ({"sliding_window": 32, "max_window_layers": 1}, 0),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, 3),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, 4),
        ({"use_sliding_window": True, "sliding_window": 32}, 0),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 0,
                "layer_types": [
                    "full_attention",
                    "sliding_attention",
                    "full_attention",
                    "full_attention",
                ],
            },
            1,
        ),
    ],
)
def test_layers_with_windows_have_their_own_cache_group(
    keys: dict[str, Any], windowed: int
) -> None:
    full, window = (
        FullAttention("full", 4 - windowed, 2, 16),
        SlidingWindow("window", windowed, 2, 16, 32),
    )
    expected = tuple(group for group in (full, window) if group.num_layers)
    assert describe_qwen2({**SMALL, **keys}).cache_groups == expected


def test_mistral_window_is_on_unless_null() -> None:
    assert describe_mistral({**SMALL, "sliding_window": None}).cache_groups == (
        FullAttention("full", 4, 2, 16),
    )
    assert describe_mistral(SMALL).cache_groups == (SlidingWindow("window", 4, 2, 16, 4096),)


@pytest.mark.parametrize(
    ("describe", "keys", "message"),
    [
        (describe_llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            describe_llama,
            {"vocab_size": None},
            "vocab_size is missing",
        ),
        (describe_llama, {"hidden_size": "64"}, "hidden_size is '64'"),
        (describe_llama, {"num_key_value_heads": 3}, r"num_attention_heads \(4\)"),
        (
            describe_llama,
            {"dtype": "float8_e4m3fn"},
            "dtype is 'float8_e4m3fn'",
        ),
        (
            describe_llama,
            {"tie_word_embeddings": 1},
            "tie_word_embeddings is 1",
        ),
        (describe_llama, {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        (describe_llama, {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        (
            describe_qwen3,
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
            "layer_types is",
        ),
        (
            describe_qwen3,
            {"use_sliding_window": True, "layer_types": [["full_attention"]] * 4},
            "layer_types is",
        ),
        (describe_qwen3_moe, {"num_experts": 4}, "num_experts_per_tok is missing"),
        (
            describe_qwen3_moe,
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5",
        ),
        (
            describe_mistral,
            {"layer_types": ["full_attention"] * 4},
            "layer_types",
        ),
    ],
)
def test_unsupported_value_is_named_by_its_key(
    describe: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        describe({**SMALL, **keys})


def test_describing_imports_no_tensor_library() -> None:
    script = (
        "import sys, tokenspeed_models.descriptors, tokenspeed_models.describe, tokenspeed_models.sharding\n"
        "import tokenspeed_models_gemma.describe, tokenspeed_models_mistral.describe\n"
        "import tokenspeed_models_olmo.describe, tokenspeed_models_phi.describe\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"
