"""Rotary tables equal those of transformers for every scaling, with old and new keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from tokenspeed_models.layers import inverse_frequencies, rotary_table
from tokenspeed_models.rope_config import read_layer_rope, read_rope

BASE: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
FACTORS = st.floats(1.0, 40.0).filter(lambda value: value > 1.0)
ORIGINALS = st.sampled_from([32, 64, 200, 4096])
SCALINGS = st.one_of(
    st.just({"rope_type": "default"}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": FACTORS}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": FACTORS,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            "original_max_position_embeddings": ORIGINALS,
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": FACTORS,
            "original_max_position_embeddings": ORIGINALS,
        },
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
            "mscale": st.floats(0.5, 2.0),
            "mscale_all_dim": st.floats(0.5, 2.0),
        },
    ),
)


@settings(max_examples=80, deadline=None)
@given(
    scaling=SCALINGS,
    theta=st.sampled_from([500.0, 10000.0, 1000000.0]),
    head_size=st.sampled_from([8, 32, 80]),
)
def test_table_equals_transformers(scaling: dict[str, Any], theta: float, head_size: int) -> None:
    config = {**BASE, "head_dim": head_size, "rope_parameters": {**scaling, "rope_theta": theta}}
    reference = LlamaRotaryEmbedding(LlamaConfig(**config))
    rope = read_rope(config, head_size)
    frequencies, factor = inverse_frequencies(rope)
    # Powers of 1,000,000 multiply the rounding of their exponents by 14.
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=4e-6, atol=0)
    assert factor == pytest.approx(reference.attention_scaling)
    positions = torch.arange(256)[None]
    cosines, sines = reference(torch.zeros(1), positions)
    table = rotary_table(rope, torch.device("cpu"))[:256]
    half = head_size // 2
    torch.testing.assert_close(table[:, :half], cosines[0, :, :half], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(table[:, half:], sines[0, :, :half], rtol=1e-3, atol=1e-3)


@given(scaling=SCALINGS, theta=st.sampled_from([500.0, 10000.0]))
def test_old_and_new_keys_give_the_same_settings(scaling: dict[str, Any], theta: float) -> None:
    new = read_rope({**BASE, "rope_parameters": {**scaling, "rope_theta": theta}}, 32)
    legacy = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert read_rope({**BASE, "rope_theta": theta, "rope_scaling": legacy}, 32) == new
    assert (
        read_rope({**BASE, "rope_parameters": {"rope_theta": theta}, "rope_scaling": legacy}, 32)
        == new
    )


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({}, 256),
        ({"rope_scaling": None, "rope_theta": 5e5}, 256),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 256),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            1024,
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            256,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            256,
        ),
    ],
)
def test_table_covers_the_scaled_context(keys: dict[str, Any], length: int) -> None:
    rope = read_rope({**BASE, **keys}, 32)
    assert rope.max_positions == length
    assert rotary_table(rope, torch.device("cpu")).shape == (length, 32)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            r"rope_scaling\.rope_type is 'proportional'",
        ),
        (
            {"rope_scaling": {"type": "longrope2", "short_factor": [1.0], "long_factor": [1.0]}},
            r"rope_scaling\.rope_type is 'longrope2'",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            r"rope_scaling\.short_factor is \[1.0\], expected a list of 16",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}},
            "short_factor is not supported",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor is None"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            r"rope_parameters\.low_freq_factor is None",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor is '2'"),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
    ],
)
def test_unsupported_value_is_named_by_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({**BASE, **keys}, 32)


def longrope(**scaling: Any) -> dict[str, Any]:
    """Return a configuration with LongRoPE on 12 of 16 values of each head."""
    factors = {
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 20.0, 50.0],
    }
    return {
        **BASE,
        "num_attention_heads": 4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "pad_token_id": None,
        "rope_scaling": {"type": "longrope", **factors, **scaling},
    }


@pytest.mark.parametrize("max_model_len", [64, 65, 256])
@pytest.mark.parametrize("scaling", [{}, {"attention_factor": 1.3}], ids=str)
def test_longrope_table_equals_transformers(max_model_len: int, scaling: dict[str, Any]) -> None:
    config = longrope(**scaling)
    reference = Phi3RotaryEmbedding(Phi3Config(**config))
    cosines, sines = reference(torch.zeros(1), torch.arange(max_model_len)[None])
    rope = read_rope(config, 16, is_partial=True)
    assert (rope.size, rope.max_positions) == (12, 256)
    table = rotary_table(rope, torch.device("cpu"), max_model_len)
    expected = torch.cat((cosines[0, :, :6], sines[0, :, :6]), dim=1)
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-4)


def test_table_ends_at_the_longest_sequence() -> None:
    rope = read_rope(BASE, 32)
    assert rotary_table(rope, torch.device("cpu"), 100).shape == (100, 32)
    assert rotary_table(rope, torch.device("cpu"), 1000).shape == (256, 32)


def test_layer_types_have_their_own_rotation() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": yarn}
    new = {
        **BASE,
        "rope_parameters": {
            "full_attention": {**yarn, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    for config, theta in ((old, 300.0), (new, 1e4)):
        full = read_layer_rope(config, 32, "full_attention", 1e6)
        assert (full.theta, full.scaling) == (5e5, read_rope(old, 32).scaling)
        local = read_layer_rope(config, 32, "sliding_attention", theta)
        assert (local.theta, local.scaling) == (300.0, None)
    assert read_layer_rope(BASE, 32, "full_attention", 1e6).theta == 1e6
