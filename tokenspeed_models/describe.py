"""Reads and describes the `config.json` of each family here. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed_core.api import (
    CacheGroupSpec,
    DraftModelInfo,
    FullAttention,
    HiddenStates,
    ModelInfo,
    SlidingWindow,
)
from tokenspeed_models.config import (
    ConfigReader,
    DecoderConfig,
    read_decoder,
    read_windows,
)
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig

Json = Mapping[str, Any]


def read_llama(config: Json) -> DecoderConfig:
    """Read a Llama 2 or 3 configuration."""
    keys = ConfigReader(config)
    bias = keys.boolean("attention_bias", False)
    return read_decoder(
        config,
        "LlamaForCausalLM",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.boolean("mlp_bias", False),
    )


def read_qwen2(config: Json) -> DecoderConfig:
    """Read a Qwen2 or Qwen2.5 configuration: biases on queries, keys and values; a window per layer."""
    return read_decoder(config, "Qwen2ForCausalLM", qkv_bias=True, windows=read_windows(config))


def read_qwen3(config: Json) -> DecoderConfig:
    """Read a Qwen3 configuration: normalized queries and keys; a window per layer."""
    bias = ConfigReader(config).boolean("attention_bias", False)
    return read_decoder(
        config,
        "Qwen3ForCausalLM",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        head_size=128,
        windows=read_windows(config),
    )


def read_qwen3_moe(config: Json) -> DecoderConfig:
    """Read a Qwen3-MoE configuration. All layers have the same window, or none."""
    keys = ConfigReader(config)
    bias = keys.boolean("attention_bias", False)
    num_layers = keys.integer("num_hidden_layers")
    window = (
        keys.integer("sliding_window", 4096) if keys.boolean("use_sliding_window", False) else None
    )
    return read_decoder(
        config,
        "Qwen3MoeForCausalLM",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=(window,) * num_layers,
        moe=_read_moe(keys, num_layers),
    )


def _read_moe(keys: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the mixture of experts. Newer configurations have `num_local_experts` instead of `num_experts`.

    Raises ValueError if they have both with different values.
    """
    names = [name for name in ("num_local_experts", "num_experts") if name in keys]
    counts = {keys.integer(name) for name in names or ["num_experts"]}
    if len(counts) > 1:
        found = " and ".join(f"{name} is {keys.integer(name)}" for name in names)
        raise ValueError(f"config.json: {found}. Both are the number of experts. Remove one.")
    (num_experts,) = counts
    every, dense = keys.integer("decoder_sparse_step", 1), keys.integers("mlp_only_layers")
    return MoeConfig(
        RoutingConfig(
            num_experts,
            keys.integer("num_experts_per_tok"),
            renormalize=keys.boolean("norm_topk_prob", False),
        ),
        intermediate_size=keys.integer("moe_intermediate_size"),
        layers=frozenset(
            layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0
        ),
    )


def describe_llama(config: Json) -> ModelInfo:
    """Describe a Llama checkpoint."""
    return model_info(read_llama(config))


def describe_qwen2(config: Json) -> ModelInfo:
    """Describe a Qwen2 checkpoint."""
    return model_info(read_qwen2(config))


def describe_qwen3(config: Json) -> ModelInfo:
    """Describe a Qwen3 checkpoint."""
    return model_info(read_qwen3(config))


def describe_qwen3_moe(config: Json) -> ModelInfo:
    """Describe a Qwen3-MoE checkpoint."""
    return model_info(read_qwen3_moe(config))


def model_info(decoder: DecoderConfig, num_extra_parameters: int = 0) -> ModelInfo:
    """Return the description of a decoder that `read_decoder` has read.

    `num_extra_parameters` are those that `count_parameters` does not know, such as a family's additional norms.
    """
    return ModelInfo(
        architecture=decoder.architecture,
        vocab_size=decoder.vocab_size,
        max_model_len=decoder.max_model_len,
        dtype=decoder.dtype,
        num_layers=decoder.num_layers,
        num_parameters=count_parameters(decoder) + num_extra_parameters,
        cache_groups=cache_groups(decoder),
        eos_token_ids=decoder.eos_token_ids,
        bos_token_id=decoder.bos_token_id,
    )


def mtp_info(
    config: Json,
    path: Path,
    load: str,
    *,
    num_draft_layers: int,
    hidden_size: int,
    num_layer_parameters: int,
    cache_group: CacheGroupSpec,
) -> DraftModelInfo:
    """Return the description of a checkpoint's first layer for multi-token prediction.

    `num_draft_layers` is the number of such layers; ValueError is raised if it is 0. `num_layer_parameters` and
    `cache_group` are those of the decoder layer in it.
    """
    if not num_draft_layers:
        raise ValueError(
            "the checkpoint has no layers for multi-token prediction: num_nextn_predict_layers in its config.json is missing "
            "or 0"
        )
    # A projection joins two normalized inputs, and the output is normalized.
    num_joining = 2 * hidden_size * hidden_size + 3 * hidden_size
    return DraftModelInfo(
        load=load,
        config=config,
        cache_groups=(cache_group,),
        num_layers=1,
        num_parameters=num_layer_parameters + num_joining,
        weights=path,
        hidden=HiddenStates.LAST,
    )


def window_group(window: int | None) -> str:
    """Return the cache group of layers with or without a window."""
    return "full" if window is None else "window"


def cache_groups(decoder: DecoderConfig) -> tuple[CacheGroupSpec, ...]:
    """Return one group for layers with full attention and one for layers with a window, if there are such layers."""
    groups: list[CacheGroupSpec] = []
    num_full = decoder.windows.count(None)
    if num_full:
        groups.append(
            FullAttention(window_group(None), num_full, decoder.num_kv_heads, decoder.head_size)
        )
    windows = {window for window in decoder.windows if window is not None}
    # No configuration here has two different windows.
    for window in windows:
        groups.append(
            SlidingWindow(
                window_group(window),
                decoder.num_layers - num_full,
                decoder.num_kv_heads,
                decoder.head_size,
                window,
            )
        )
    return tuple(groups)


def count_parameters(decoder: DecoderConfig) -> int:
    """Return the number of parameters. Tied parameters count once."""
    num_embeddings = 1 if decoder.tie_embeddings else 2
    other = decoder.hidden_size + num_embeddings * decoder.vocab_size * decoder.hidden_size
    return count_layer_parameters(decoder) + other


def count_layer_parameters(decoder: DecoderConfig) -> int:
    """Return the number of parameters of all layers."""
    hidden, head = decoder.hidden_size, decoder.head_size
    q_size, kv_size = decoder.num_heads * head, decoder.num_kv_heads * head
    attention = hidden * (q_size + 2 * kv_size) + q_size * hidden
    if decoder.qk_norm:
        attention += q_size + kv_size if decoder.is_qk_norm_joint else 2 * head
    attention += (q_size + 2 * kv_size if decoder.qkv_bias else 0) + (
        hidden if decoder.out_bias else 0
    )
    dense = 3 * hidden * decoder.intermediate_size
    dense += 2 * decoder.intermediate_size + hidden if decoder.mlp_bias else 0
    total = decoder.num_layers * (attention + 2 * hidden)
    if decoder.moe is None:
        return total + decoder.num_layers * dense
    num_sparse = len(decoder.moe.layers)
    return (
        total
        + num_sparse * _count_experts(decoder.moe, hidden)
        + (decoder.num_layers - num_sparse) * dense
    )


def _count_experts(moe: MoeConfig, hidden: int) -> int:
    """Return the parameters of one layer's router and experts."""
    num_experts = moe.routing.num_experts
    router = num_experts * (hidden + (1 if moe.has_router_bias else 0))
    shared = 3 * hidden * moe.shared_size + (hidden if moe.is_shared_gated else 0)
    return router + 3 * hidden * num_experts * moe.intermediate_size + shared
