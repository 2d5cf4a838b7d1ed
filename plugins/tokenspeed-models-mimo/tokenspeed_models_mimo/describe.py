"""Reads and describes the `config.json` of MiMo-7B. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenspeed_core.api import DraftModelInfo, ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig
from tokenspeed_models.describe import (
    cache_groups,
    count_layer_parameters,
    model_info,
    mtp_info,
    read_qwen2,
)


def read_mimo(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a configuration. Raises ValueError naming the key."""
    keys = ConfigReader(config)
    if not keys.boolean("attention_bias", True):
        raise ValueError("config.json: attention_bias is False. Supported for this family: True.")
    return replace(
        read_qwen2(config),
        architecture="MiMoForCausalLM",
        num_draft_layers=sum(keys.integers("num_nextn_predict_layers")),
    )


def describe_mimo(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a MiMo-7B checkpoint."""
    return model_info(read_mimo(config))


def draft_layer(c: DecoderConfig) -> DecoderConfig:
    """Return a configuration with a single layer, as the one for multi-token prediction."""
    return replace(c, num_layers=1, windows=(None,))


def plan_mtp(config: Mapping[str, Any], path: Path) -> DraftModelInfo:
    """Describe the first layer for multi-token prediction. Raises ValueError if there is no such layer."""
    layer = draft_layer(read_mimo(config))
    (group,) = cache_groups(layer)
    return mtp_info(
        config,
        path,
        "tokenspeed_models_mimo.model:MiMoMTP",
        num_draft_layers=layer.num_draft_layers,
        hidden_size=layer.hidden_size,
        num_layer_parameters=count_layer_parameters(layer),
        cache_group=group,
    )
