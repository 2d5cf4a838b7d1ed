"""Reads and describes the `config.json` of DeepSeek V2 and V3, Kimi K2, and GLM-4.7-Flash.

Imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenspeed_core.api import DraftModelInfo, LatentAttention, LatentSizes, ModelInfo
from tokenspeed_models.config import ConfigReader, read_dtype
from tokenspeed_models.describe import mtp_info
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.rope_config import RopeConfig, YarnScaling, read_rope, yarn_mscale

Json = Mapping[str, Any]

# The defaults of transformers for GLM-4.7-Flash that differ from DeepSeek-V3's.
_GLM4_MOE_LITE = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """A decoder with latent attention and, in most layers, a mixture of experts.

    `query_rank` is the size of the queries' latent, None if queries are projected in one step. `scale` is the factor of
    attention scores. `num_draft_layers` are layers after the last one, for multi-token prediction.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_draft_layers: int
    sizes: LatentSizes
    query_rank: int | None
    has_attention_bias: bool
    scale: float
    is_interleaved: bool
    norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig
    moe: MoeConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_v2(config: Json) -> DeepseekConfig:
    """Read a DeepSeek-V2 configuration. Routing is by softmax, over all experts or over the best groups."""
    keys = ConfigReader(config)
    method = keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    keys.choice("scoring_func", ("softmax",), "softmax")
    if keys.boolean("norm_topk_prob", False):
        raise ValueError("config.json: norm_topk_prob is True. Supported for this family: False.")
    has_groups = method == "group_limited_greedy"
    routing = RoutingConfig(
        keys.integer("n_routed_experts", 64),
        keys.integer("num_experts_per_tok"),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group") if has_groups else 1,
        top_groups=keys.integer("topk_group") if has_groups else 1,
    )
    return _read(config, keys, routing, first_sparse_layer=0)


def read_v3(config: Json) -> DeepseekConfig:
    """Read a DeepSeek-V3 or Kimi K2 configuration. Routing is by sigmoid, with a bias for the choice."""
    keys = ConfigReader(config)
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    keys.choice("scoring_func", ("sigmoid",), "sigmoid")
    routing = RoutingConfig(
        keys.integer("n_routed_experts", 256),
        keys.integer("num_experts_per_tok", 8),
        score="sigmoid",
        renormalize=keys.boolean("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 2.5),
        num_groups=keys.integer("n_group"),
        top_groups=keys.integer("topk_group"),
        group_score="top_2_sum",
        has_bias=True,
    )
    return _read(config, keys, routing, first_sparse_layer=3)


def _read(
    config: Json, keys: ConfigReader, routing: RoutingConfig, *, first_sparse_layer: int
) -> DeepseekConfig:
    """Read the keys that both generations share. `first_sparse_layer` is the default of first_k_dense_replace."""
    keys.choice("hidden_act", ("silu",), "silu")
    if keys.boolean("mlp_bias", False):
        raise ValueError("config.json: mlp_bias is True. Supported for this family: False.")
    sizes = LatentSizes(
        num_heads=keys.integer("num_attention_heads"),
        latent_size=keys.integer("kv_lora_rank"),
        rope_size=keys.integer("qk_rope_head_dim"),
        nope_size=keys.integer("qk_nope_head_dim"),
        value_size=keys.integer("v_head_dim"),
    )
    rope = read_rope(config, sizes.rope_size)
    scale = (sizes.nope_size + sizes.rope_size) ** -0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2
    num_layers, every = keys.integer("num_hidden_layers"), keys.integer("moe_layer_freq", 1)
    if "first_k_dense_replace" in keys:
        (first_sparse_layer,) = keys.integers("first_k_dense_replace")
    expert_size = keys.integer("moe_intermediate_size")
    bos = keys.integers("bos_token_id")
    return DeepseekConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_draft_layers=sum(keys.integers("num_nextn_predict_layers")),
        sizes=sizes,
        query_rank=keys.integer("q_lora_rank") if "q_lora_rank" in keys else None,
        has_attention_bias=keys.boolean("attention_bias", False),
        scale=scale,
        is_interleaved=keys.boolean("rope_interleave", True),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_embeddings=keys.boolean("tie_word_embeddings", False),
        rope=rope,
        moe=MoeConfig(
            routing,
            intermediate_size=expert_size,
            layers=frozenset(
                layer for layer in range(first_sparse_layer, num_layers) if layer % every == 0
            ),
            shared_size=expert_size * sum(keys.integers("n_shared_experts")),
            is_router_wide=True,
        ),
        dtype=read_dtype(config),
        eos_token_ids=keys.integers("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    )


def text_config(config: Json) -> Json:
    """Return the configuration of the language model inside a Kimi K2.5 configuration."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config is {text!r}, expected an object")
    inherited = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id")
    return {**{key: config[key] for key in inherited if key in config}, **text}


def glm4_moe_lite_config(config: Json) -> Json:
    """Return the DeepSeek-V3 configuration of the model that a GLM-4.7-Flash configuration describes.

    Newer configurations list the kind of each layer in `mlp_layer_types`. Raises ValueError if dense layers are not the
    first.
    """
    found = {**_GLM4_MOE_LITE, **config}
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        num_layers = ConfigReader(config).integer("num_hidden_layers")
        num_dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
            raise ValueError(
                f"config.json: mlp_layer_types is {kinds!r}. "
                f"Supported: {num_layers} layers, dense ones first, then sparse ones."
            )
        found["first_k_dense_replace"] = num_dense
    return found


def describe_v2(config: Json) -> ModelInfo:
    """Describe a DeepSeek-V2 checkpoint."""
    return _info("DeepseekV2ForCausalLM", read_v2(config))


def describe_v3(config: Json) -> ModelInfo:
    """Describe a DeepSeek-V3, R1 or V3.1 checkpoint, or one of Kimi K2 that names this architecture."""
    return _info("DeepseekV3ForCausalLM", read_v3(config))


def describe_kimi_k2(config: Json) -> ModelInfo:
    """Describe a Kimi K2 checkpoint."""
    return _info("KimiK2ForCausalLM", read_v3(config))


def describe_kimi_k25(config: Json) -> ModelInfo:
    """Describe the language model of a Kimi K2.5 checkpoint."""
    return _info("KimiK25ForConditionalGeneration", read_v3(text_config(config)))


def describe_glm4_moe_lite(config: Json) -> ModelInfo:
    """Describe a GLM-4.7-Flash checkpoint."""
    return _info("Glm4MoeLiteForCausalLM", read_v3(glm4_moe_lite_config(config)))


def plan_mtp(config: Json, path: Path) -> DraftModelInfo:
    """Describe the first layer for multi-token prediction. Raises ValueError if there is no such layer."""
    c = read_v3(config)
    layer = replace(c, num_layers=1, moe=replace(c.moe, layers=frozenset((0,))))
    return mtp_info(
        config,
        path,
        "tokenspeed_models_deepseek.model:DeepseekMTP",
        num_draft_layers=c.num_draft_layers,
        hidden_size=c.hidden_size,
        num_layer_parameters=_count_layers(layer),
        cache_group=LatentAttention("latent", 1, c.sizes.latent_size, c.sizes.rope_size),
    )


def plan_glm4_moe_lite_mtp(config: Json, path: Path) -> DraftModelInfo:
    """Describe the layer for multi-token prediction of a GLM-4.7-Flash checkpoint, as `plan_mtp` does."""
    return plan_mtp(glm4_moe_lite_config(config), path)


def _info(architecture: str, c: DeepseekConfig) -> ModelInfo:
    group = LatentAttention("latent", c.num_layers, c.sizes.latent_size, c.sizes.rope_size)
    return ModelInfo(
        architecture=architecture,
        vocab_size=c.vocab_size,
        max_model_len=c.rope.max_positions,
        dtype=c.dtype,
        num_layers=c.num_layers,
        num_parameters=_count_parameters(c),
        cache_groups=(group,),
        eos_token_ids=c.eos_token_ids,
        bos_token_id=c.bos_token_id,
    )


def _count_parameters(c: DeepseekConfig) -> int:
    """Return the number of parameters without draft layers. Tied parameters count once."""
    num_embeddings = 1 if c.tie_embeddings else 2
    return _count_layers(c) + c.hidden_size + num_embeddings * c.vocab_size * c.hidden_size


def _count_layers(c: DeepseekConfig) -> int:
    """Return the number of parameters of all layers."""
    hidden, sizes, moe = c.hidden_size, c.sizes, c.moe
    entry_size, heads = sizes.latent_size + sizes.rope_size, sizes.num_heads
    q_size = heads * (sizes.nope_size + sizes.rope_size)
    attention = hidden * entry_size + sizes.latent_size
    attention += sizes.latent_size * heads * (sizes.nope_size + sizes.value_size)
    attention += heads * sizes.value_size * hidden
    if c.query_rank is None:
        attention += hidden * q_size
    else:
        attention += c.query_rank * (hidden + 1 + q_size)
    if c.has_attention_bias:
        attention += entry_size + hidden + (c.query_rank or 0)
    dense = 3 * hidden * c.intermediate_size
    sparse = moe.routing.num_experts * hidden * (1 + 3 * moe.intermediate_size)
    sparse += 3 * hidden * moe.shared_size
    num_sparse = len(moe.layers)
    total = c.num_layers * (attention + 2 * hidden)
    return total + (c.num_layers - num_sparse) * dense + num_sparse * sparse
