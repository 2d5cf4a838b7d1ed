"""Reads and describes the `config.json` of GLM-4.5 and its successors. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenspeed_core.api import DraftModelInfo, ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig, read_decoder
from tokenspeed_models.describe import cache_groups, count_layer_parameters, model_info, mtp_info
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.rope_config import read_rope


def read_glm4_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a configuration. If `partial_rotary_factor` is missing, half of each head is rotated, as in transformers.

    Raises ValueError naming the key.
    """
    keys = ConfigReader(config)
    return read_decoder(
        {"partial_rotary_factor": 0.5, **config},
        "Glm4MoeForCausalLM",
        qkv_bias=keys.boolean("attention_bias", False),
        qk_norm=keys.boolean("use_qk_norm", False),
        rope=partial(read_rope, is_partial=True),
        moe=_read_moe(keys),
        num_draft_layers=sum(keys.integers("num_nextn_predict_layers")),
    )


def _read_moe(keys: ConfigReader) -> MoeConfig:
    """Read the mixture of experts: sigmoid routing with a bias for the choice, dense first layers."""
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    expert_size, num_layers = (
        keys.integer("moe_intermediate_size"),
        keys.integer("num_hidden_layers"),
    )
    (num_dense,) = keys.integers("first_k_dense_replace") or (1,)
    (num_shared,) = keys.integers("n_shared_experts") or (1,)
    return MoeConfig(
        RoutingConfig(
            keys.integer("n_routed_experts"),
            keys.integer("num_experts_per_tok"),
            score="sigmoid",
            renormalize=keys.boolean("norm_topk_prob", True),
            scale=keys.number("routed_scaling_factor", 1.0),
            num_groups=keys.integer("n_group", 1),
            top_groups=keys.integer("topk_group", 1),
            group_score="top_2_sum",
            has_bias=True,
        ),
        intermediate_size=expert_size,
        layers=frozenset(range(num_dense, num_layers)),
        shared_size=num_shared * expert_size,
        is_router_wide=True,
    )


def describe_glm4_moe(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a GLM-4.5, 4.6 or 4.7 checkpoint."""
    return model_info(read_glm4_moe(config))


def draft_layer(c: DecoderConfig) -> DecoderConfig:
    """Return a configuration with a single layer, which has experts, as in layers for multi-token prediction."""
    assert c.moe is not None, "GLM-4.5 has experts"
    moe = replace(c.moe, layers=frozenset((0,)))
    return replace(c, num_layers=1, windows=(None,), moe=moe)


def plan_mtp(config: Mapping[str, Any], path: Path) -> DraftModelInfo:
    """Describe the first layer for multi-token prediction. Raises ValueError if there is no such layer."""
    layer = draft_layer(read_glm4_moe(config))
    (group,) = cache_groups(layer)
    return mtp_info(
        config,
        path,
        "tokenspeed_models_glm.model:Glm4MoeMTP",
        num_draft_layers=layer.num_draft_layers,
        hidden_size=layer.hidden_size,
        num_layer_parameters=count_layer_parameters(layer),
        cache_group=group,
    )
