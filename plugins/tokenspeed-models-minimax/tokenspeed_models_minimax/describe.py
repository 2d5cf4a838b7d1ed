"""Reads and describes the `config.json` of MiniMax-M2 and its successors. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig, read_decoder
from tokenspeed_models.describe import model_info
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.rope_config import read_rope

HEAD_SIZE = 128  # if the key is missing


def read_minimax_m2(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a configuration. Published checkpoints have `rotary_dim` instead of `partial_rotary_factor`.

    Raises ValueError naming the key.
    """
    keys = ConfigReader(config)
    _refuse_other_designs(keys)
    num_layers = keys.integer("num_hidden_layers")
    head_size = keys.integer("head_dim", HEAD_SIZE)
    rotary_size = keys.integer("rotary_dim", head_size)
    return read_decoder(
        {"partial_rotary_factor": rotary_size / head_size, **config},
        "MiniMaxM2ForCausalLM",
        qk_norm=keys.boolean("use_qk_norm", True),
        is_qk_norm_joint=True,
        head_size=HEAD_SIZE,
        rope=partial(read_rope, is_partial=True, theta=5e6),
        moe=MoeConfig(
            RoutingConfig(
                keys.integer("num_local_experts"),
                keys.integer("num_experts_per_tok"),
                score="sigmoid",
                renormalize=True,
                has_bias=keys.boolean("use_routing_bias", True),
            ),
            intermediate_size=keys.integer("intermediate_size"),
            layers=frozenset(range(num_layers)),
            is_router_wide=True,
        ),
        num_draft_layers=_num_draft_layers(keys),
    )


def _refuse_other_designs(keys: ConfigReader) -> None:
    """Raise ValueError for settings of other MiniMax models."""
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    keys.choice("qk_norm_type", ("per_layer",), "per_layer")
    keys.refuse("sliding_window", "this family has full attention in all layers")
    if any(kind != 1 for kind in keys.integers("attn_type_list")):
        raise ValueError(
            "config.json: attn_type_list has values other than 1. Supported: 1 (full attention) in all layers."
        )
    if any(keys.integers("shared_intermediate_size")):
        raise ValueError("config.json: shared_intermediate_size is not 0. Supported: 0.")


def _num_draft_layers(keys: ConfigReader) -> int:
    """Return the number of layers for multi-token prediction after the last one."""
    if not keys.boolean("use_mtp", False):
        return 0
    return keys.integer("num_mtp_modules", 1) * keys.integer("mtp_transformer_layers", 1)


def describe_minimax_m2(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a MiniMax-M2, M2.1 or M2.5 checkpoint."""
    return model_info(read_minimax_m2(config))
