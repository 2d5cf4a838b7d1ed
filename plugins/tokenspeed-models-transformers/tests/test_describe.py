"""Descriptions of models, and refusals of those that cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf
from typing import Any

import pytest
import torch
from tiny_models import ALL, LATENT, LONGROPE, SMALL
from tokenspeed_models_transformers.describe import describe
from tokenspeed_models_transformers.library import make_model, read_config
from tokenspeed_models_transformers.recording import RECORD
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokenspeed_core.api import FullAttention, SlidingWindow
from tokenspeed_core.api.cache_groups import values_per_token


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return a tiny config.json."""
    values: dict[str, Any] = CONFIG_MAPPING[model_type](**{**SMALL, **changes}).to_dict()
    return values


def test_defaults_of_the_class_complete_a_config() -> None:
    info = describe({"model_type": "olmo", "architectures": ["OlmoForCausalLM"], "hidden_size": 64})
    assert (info.architecture, info.dtype, info.num_layers) == ("OlmoForCausalLM", "float32", 32)
    assert (info.vocab_size, info.max_model_len) == (50304, 2048)
    assert info.cache_groups == (FullAttention("full_32x2", 32, 32, 2),)
    assert info.num_parameters == 50304 * 64 * 2 + 32 * (4 * 64**2 + 3 * 64 * 11008)


def test_infinity_in_a_config_file_is_read() -> None:
    config = CONFIG_MAPPING["granitemoehybrid"](**{**SMALL, **ALL["granitemoehybrid"]})
    written = json.loads(config.to_json_string())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert read_config(written).time_step_limit == (0.0, inf)


def test_hybrid_model_may_have_attention_only() -> None:
    config = config_of("granitemoehybrid", **ALL["granitemoehybrid"])
    assert describe(config).cache_groups == (FullAttention("full_2x8", 2, 2, 8),)


def test_layers_with_windows_have_their_own_group() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = config_of("exaone4", num_hidden_layers=3, sliding_window=9, layer_types=kinds)
    groups = describe(config).cache_groups
    assert groups == (
        SlidingWindow("window_9_2x8", 2, 2, 8, 9),
        FullAttention("full_2x8", 1, 2, 8),
    )


def test_values_smaller_than_keys_take_less_memory() -> None:
    groups = describe(config_of("minicpm3", **LATENT)).cache_groups
    (group,) = groups
    assert isinstance(group, FullAttention)
    assert (group.num_kv_heads, group.head_size, group.value_head_size) == (4, 12, 8)
    assert values_per_token(group) == group.num_layers * 4 * (12 + 8)


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [
        ("smollm3", LONGROPE),
        ("gemma3_text", {"sliding_attention": {"rope_theta": 1e3}, "full_attention": LONGROPE}),
    ],
)
def test_longrope_is_limited_to_its_original_length(
    model_type: str, parameters: dict[str, Any]
) -> None:
    config = config_of(model_type, head_dim=8, rope_parameters=parameters)
    assert describe(config).max_model_len == 64
    device = torch.device("meta")
    model: Any = make_model(read_config(config), torch.float32, device, RECORD, trusts_code=False)
    assert "longrope" not in str(model.model.rotary_emb.rope_type)


def test_layers_that_share_keys_have_their_own_cache() -> None:
    windows, full = describe(config_of("gemma4_text", **ALL["gemma4_text"])).cache_groups
    assert windows == SlidingWindow("window_9_2x8", 2, 2, 8, 9)
    assert full == FullAttention("full_2x16", 2, 2, 16)


def test_process_without_torch_asks_a_subprocess() -> None:
    config = config_of("starcoder2", sliding_window=9)
    code = (
        "import json, sys\n"
        "from tokenspeed_models_transformers.describe import describe\n"
        f"print(describe(json.loads({json.dumps(json.dumps(config))})))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    printed = subprocess.check_output([sys.executable, "-P", "-c", code], text=True)
    assert printed.strip() == str(describe(config))


# Values that a tiny configuration needs.
TINY: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "granitemoehybrid": ALL["granitemoehybrid"],
    "dory": ALL["dory"],
}


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("bart", {}, "it has an encoder"),
        ("bert", {}, "not causal"),
        ("bloom", {}, "mask"),
        ("mllama", {}, "8 of its 40 layers have no self-attention. .* cross attention"),
        ("gemma", {"use_bidirectional_attention": True}, "the attention mask is causal"),
        ("llama", {"prefix_lm": True}, "prefix_lm, which models of the type llama do not use"),
        ("mistral", {"is_causal": False, "sliding_window": 9}, "see 10 tokens on each side"),
        ("mamba", {}, "layers of the type linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of the type conv"),
        ("falcon", {}, "falcon .* does not use the attention interface"),
        ("gpt_neo", {}, "gpt_neo .* does not use the attention interface"),
        ("git", {}, "git .* does not use the attention interface"),
        ("jetmoe", {}, "jetmoe .* control flow depends on values"),
        ("nemotron", {"num_key_value_heads": None}, "nemotron .* cannot be built: TypeError"),
        ("deepseek_v2", LATENT, "deepseek_v2 .* failed with TypeError: topk"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "granitemoehybrid.* must divide"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 2}, "layers of the type linear_attention"),
        ("dory", {"recurrent_kv_cache_mode": "last_loop"}, "dory .* last_loop is not supported"),
        ("openai-gpt", {}, "openai-gpt .* uses its attention mask outside"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, r"layers\.0.* hides all tokens"),
        ("llama", {"dtype": "float64"}, "dtype is 'float64'"),
    ],
)
def test_unsupported_model_is_refused(model_type: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        describe({**config_of(model_type, **TINY.get(model_type, {})), **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.release
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_any_type_is_described_or_refused_in_one_line(model_type: str) -> None:
    message = model_type
    try:
        assert describe({"model_type": model_type}).num_layers > 0
    except ValueError as error:
        message = str(error)
    assert model_type in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2_moe", {}),  # a window of 0
        ("llama4_text", {"layer_types": ["full_attention"] * 2}),  # chunks
    ],
)
def test_unsupported_mask_that_no_layer_uses_is_ignored(
    model_type: str, changes: dict[str, Any]
) -> None:
    (group,) = describe(config_of(model_type, **changes)).cache_groups
    assert isinstance(group, FullAttention)


def test_unknown_model_needs_newer_library_or_its_own_code() -> None:
    with pytest.raises(ValueError, match="pip install --upgrade transformers"):
        describe({"model_type": "unheard"})
    with pytest.raises(ValueError, match="--trust-remote-code"):
        describe({"model_type": "unheard", "auto_map": {"AutoConfig": "configuration.C"}})
