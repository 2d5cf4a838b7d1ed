"""Quantized checkpoints give the same logits on several processes as on one, up to the rounding of activations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from process_pool import ProcessPool, RankBuild, Sizes, tensor_parallel

from tokenspeed_core.api import FUSED_OP, LayerSchemes
from tokenspeed_core.checkpoint.quantization import find_quantization
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.targets import load_target
from tokenspeed_models.descriptors import QWEN3_MOE
from tokenspeed_models.layers import CausalLM, Linear, Projection
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.testing import sequence_logits
from tokenspeed_models.weights import Shard

TOKENS = [3, 100, 7, 45, 0, 91, 12, 13]
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [0],
}
BLOCKS = {"head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
INT4 = {"bits": 4, "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


FORMS: dict[str, tuple[dict[str, Any], dict[str, int], float]] = {
    "awq": (
        {"quant_method": "awq", **INT4, "zero_point": True, "version": "gemm"},
        {},
        1e-4,
    ),
    "gptq": ({"quant_method": "gptq", **INT4, "desc_act": True, "sym": False}, {}, 1e-4),
    "mxfp4": (
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            None,
        ),
        {},
        1e-4,
    ),
    "fp8 per channel": (
        compressed(
            "float-quantized",
            {**FP8, "strategy": "channel", "dynamic": False},
            {**FP8, "strategy": "token", "dynamic": True},
        ),
        {},
        0.06,  # each process scales its features of a token by their largest
    ),
    "fp8 blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        BLOCKS,
        1e-4,
    ),
    "mxfp8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
        {},
        1e-4,
    ),
    "nvfp4": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "group_size": 16},
                    "targets": ["Linear"],
                }
            },
        },
        {},
        0.02,  # the experts of a process share the largest of their input scales
    ),
}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    **BLOCKS,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
}
GPT_OSS = {**SIZES, "num_local_experts": 4, "sliding_window": 8}
# Layers of other kinds: the expansion of latents, experts with biases, and stacked projections.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "DeepseekV3": (
        "tokenspeed_models_deepseek.model:DeepseekV3ForCausalLM",
        DEEPSEEK,
        FORMS["fp8 blocks"][0],
        1e-4,
    ),
    "Glm4MoeLite": (
        "tokenspeed_models_deepseek.model:Glm4MoeLiteForCausalLM",
        {**DEEPSEEK, "v_head_dim": 128},
        FORMS["fp8 per channel"][0],
        0.06,
    ),
    "GptOss": (
        "tokenspeed_models_gpt_oss.model:GptOssForCausalLM",
        GPT_OSS,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
        1e-4,
    ),
    "Phi3": (
        "tokenspeed_models_phi.model:Phi3ForCausalLM",
        {**SIZES, "original_max_position_embeddings": 128},
        FORMS["fp8 per channel"][0],
        0.06,
    ),
}
PARALLEL = {
    "tp2": tensor_parallel(2),
    "tp2+ep2": Sizes(attn=2, dense=2, experts=2),
}


def varied(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return scales that differ: times 0.5 to 1.5, or with exponents that are larger by 0 or 1."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if scale.dtype == torch.uint8:
        return scale + torch.randint(2, scale.shape, dtype=torch.uint8, generator=generator)
    return (scale.float() * (0.5 + torch.rand(scale.shape, generator=generator))).to(scale.dtype)


def scheme_of(settings: dict[str, Any]) -> LayerSchemes:
    checkpoint: Any = SimpleNamespace(
        name="tiny", path="tiny", config={"quantization_config": settings}
    )
    method = find_quantization(None, checkpoint, Catalog.discover())
    assert method is not None
    return method.scheme_of


def make(build: RankBuild, config: dict[str, Any], load: str = QWEN3_MOE.load) -> CausalLM:
    """Return a model with a `quantization_config` that applies."""
    build.schemes = scheme_of(config["quantization_config"])
    model: CausalLM = load_target(load)(config, build)
    return model


def both_logits(
    build: RankBuild,
    config: dict[str, Any],
    load: str = QWEN3_MOE.load,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of one of several processes, and those of a single process."""
    whole = RankBuild()
    alone, model = make(whole, config, load), make(build, config, load)
    slots = list(alone.weight_map())
    kinds = {slot.name: slot.kind for slot in slots}
    weights = {
        name: varied(name, tensor) if kinds[name] == "scale" else tensor
        for name, tensor in read_dummy("", alone, lambda done, total: None)
    }
    alone.load_weights(weights.items())
    for slot in slots:
        # The expansion of latents is dequantized and freed.
        if slot.quantization is not None and slot.target.untyped_storage().size():
            weights[slot.name] = slot.target.clone()
            weights[slot.quantization.scale_name] = slot.quantization.scale.clone()
    model.load_weights(weights.items())
    with torch.inference_mode():
        return sequence_logits(model, build, TOKENS, chunk), sequence_logits(alone, whole, TOKENS)


def fused_logits(
    build: RankBuild, config: dict[str, Any], load: str = QWEN3_MOE.load
) -> tuple[list[str], tuple[torch.Tensor, ...]]:
    """Return the ops of fused all-reduces, and logits: with fusion, of one process, and without fusion.

    The first step has 6 tokens and is not fused; the second has 2 and is fused.
    """
    separate, _ = both_logits(build.new(), config, load, chunk=6)
    build.max_fused_tokens = 5
    logits = both_logits(build, config, load, chunk=6)
    return build.fused_ops, (*logits, separate)


@pytest.mark.parametrize("parallelism", PARALLEL)
@pytest.mark.parametrize("form", FORMS)
def test_quantized_logits_of_several_processes_equal_one(
    form: str, parallelism: str, pool: ProcessPool
) -> None:
    settings, changes, tolerance = FORMS[form]
    config = {**SIZES, **changes, "quantization_config": settings}
    for sharded, whole in pool.run(both_logits, PARALLEL[parallelism], config):
        assert float(whole.norm()) > 0
        assert float((sharded - whole).norm() / whole.norm()) < tolerance


@pytest.mark.parametrize(
    ("form", "quantizing"),
    [
        ("fp8 per channel", f"{FUSED_OP}_fp8"),
        ("fp8 blocks", f"{FUSED_OP}_fp8_groups"),
        ("awq", FUSED_OP),
    ],
)
def test_quantized_layers_take_summands(form: str, quantizing: str, pool: ProcessPool) -> None:
    settings, changes, tolerance = FORMS[form]
    config = {**SIZES, **changes, "quantization_config": settings}
    results = pool.run(fused_logits, PARALLEL["tp2+ep2"], config)
    for fused_ops, (sharded, whole, separate) in results:
        # Before the MLP and the second attention. The router and the head read unquantized values.
        assert fused_ops == [quantizing, quantizing, FUSED_OP, FUSED_OP]
        assert float((sharded - whole).norm() / whole.norm()) < tolerance
        # The sum of two summands does not depend on their order.
        assert torch.equal(sharded, separate)


@pytest.mark.parametrize(
    ("family", "quantizing", "num_quantizing"),
    [("DeepseekV3", f"{FUSED_OP}_fp8_groups", 2), ("Phi3", f"{FUSED_OP}_fp8", 3)],
)
def test_other_quantized_layers_take_summands(
    family: str, quantizing: str, num_quantizing: int, pool: ProcessPool
) -> None:
    load, sizes, settings, tolerance = FAMILIES[family]
    config = {**sizes, "quantization_config": settings}
    results = pool.run(fused_logits, tensor_parallel(2), config, load)
    for fused_ops, (sharded, whole, separate) in results:
        others = [FUSED_OP] * (4 - num_quantizing)
        assert fused_ops == [quantizing] * num_quantizing + others
        assert float((sharded - whole).norm() / whole.norm()) < tolerance
        assert torch.equal(sharded, separate)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_quantized_layers_are_divided(family: str, pool: ProcessPool) -> None:
    load, sizes, settings, tolerance = FAMILIES[family]
    config = {**sizes, "quantization_config": settings}
    for sharded, whole in pool.run(both_logits, tensor_parallel(2), config, load):
        assert float(whole.norm()) > 0
        assert float((sharded - whole).norm() / whole.norm()) < tolerance


@pytest.mark.parametrize(
    ("form", "sizes", "changes", "named"),
    [
        (
            "fp8 blocks",
            Sizes(dense=2),
            {**BLOCKS, "intermediate_size": 384},
            "gate_proj has 192 features on each of 2 processes",
        ),
        (
            "gptq",
            Sizes(dense=2),
            {"intermediate_size": 96},
            "down_proj has 48 features on each of 2 processes.*blocks of 32",
        ),
        (
            "fp8 blocks",
            Sizes(moe=2),
            {**BLOCKS, "moe_intermediate_size": 384},
            "experts have 192 features on each of 2 processes",
        ),
        *(
            (
                form,
                Sizes(moe=2),
                {"moe_intermediate_size": 96},
                "experts have 48 features on each of 2 processes.*blocks of 32.*--enable-expert-parallel",
            )
            for form in ("mxfp4", "gptq")
        ),
    ],
)
def test_divided_scale_blocks_are_refused(
    form: str, sizes: Sizes, changes: dict[str, int], named: str
) -> None:
    config = {**SIZES, **changes, "quantization_config": FORMS[form][0]}
    with pytest.raises(ValueError, match=named):
        make(RankBuild(sizes.layout(0)), config)


def test_ordering_across_processes_is_refused() -> None:
    build = RankBuild(Sizes(dense=2).layout(0))
    scheme = scheme_of(FORMS["gptq"][0])("model.layers.0.mlp.down_proj")
    build.schemes = lambda layer: scheme
    linear = Linear(build, 128, (Projection("down_proj", 8, Shard(1, "dense")),))
    slot = next(each for each in linear.slots("") if each.kind == "index")
    slot.fill(torch.arange(128) // 32, build.group)
    with pytest.raises(ValueError, match=r"desc_act.*--dense-tp-size 1"):
        slot.fill(torch.arange(128).flip(0) // 32, build.group)
