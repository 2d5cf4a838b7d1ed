"""DeepSeek, Kimi K2 and GLM-4.7-Flash: published configurations, and forms that only their checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_build import (
    TOKENS,
    QuantizedBuild,
    checkpoint_logits,
    load,
    logprob_errors,
    read_schemes,
    relative,
    transformers_logits,
)
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_models_deepseek import DEEPSEEK_V3, KIMI_K25
from tokenspeed_models_deepseek.describe import (
    describe_glm4_moe_lite,
    describe_kimi_k2,
    describe_kimi_k25,
    describe_v2,
    describe_v3,
    glm4_moe_lite_config,
    read_v3,
)
from tokenspeed_models_deepseek.model import (
    DeepseekMTP,
    DeepseekV3ForCausalLM,
    KimiK25ForConditionalGeneration,
)
from tokenspeed_quantization.schemes import FP8_BLOCK
from transformers import Glm4MoeLiteConfig

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import LatentAttention
from tokenspeed_core.api.cache_groups import values_per_token
from tokenspeed_core.worker.attention import AttentionGroup
from tokenspeed_kernels.reference import mla
from tokenspeed_kernels.reference.fp8_block import quantize_blocks, spread_blocks
from tokenspeed_models.testing import DenseBuild

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
K2: dict[str, Any] = {
    **V3,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pad_token_id": 154820,
    "eos_token_id": [154820, 154827, 154829],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "transformers_version": "5.0.0rc0",
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
# The keys that have no default.
LITE_SIZES = (
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "vocab_size",
)
# `quantization_config` of DeepSeek-V3
BLOCK_WISE: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
K25 = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": K2}


@pytest.mark.parametrize(
    ("describe", "config", "num_parameters", "max_model_len"),
    [
        (describe_v2, V2_LITE, 15_706_484_224, 163840),
        (describe_v3, V3, 671_026_404_352, 163840),
        (describe_kimi_k2, K2, 1_026_408_209_408, 131072),
        (describe_kimi_k25, K25, 1_026_408_209_408, 131072),
        (describe_glm4_moe_lite, GLM_47_FLASH, 29_943_390_976, 202752),
    ],
    ids=["V2-Lite", "V3", "K2", "K2.5", "GLM-4.7-Flash"],
)
def test_published_configurations_are_described(
    describe: Any, config: dict[str, Any], num_parameters: int, max_model_len: int
) -> None:
    info = describe(config)
    assert info.architecture == config["architectures"][0] or describe is describe_kimi_k2
    assert (info.num_parameters, info.max_model_len) == (num_parameters, max_model_len)
    text = config.get("text_config", config)
    eos = text["eos_token_id"]
    assert info.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert info.dtype == "bfloat16"
    assert info.cache_groups == (LatentAttention("latent", info.num_layers, 512, 64),)
    assert values_per_token(info.cache_groups[0]) == 576 * text["num_hidden_layers"]


@pytest.mark.parametrize(
    ("describe", "changes", "message"),
    [
        (describe_v2, {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (describe_v2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (describe_v2, {"mlp_bias": True}, "mlp_bias is True"),
        (describe_v3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (describe_v3, {"n_group": 7}, "7 groups of 256"),
        (describe_v3, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (describe_kimi_k25, {"text_config": None}, "text_config is None"),
        (describe_glm4_moe_lite, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (describe_glm4_moe_lite, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (describe_glm4_moe_lite, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (describe_glm4_moe_lite, {"rope_scaling": {"type": "own"}}, "own"),
        (describe_glm4_moe_lite, {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        (
            describe_glm4_moe_lite,
            {"mlp_layer_types": ["sparse"] * 46 + ["dense"]},
            "mlp_layer_types",
        ),
    ],
)
def test_unsupported_values_are_named_by_their_keys(
    describe: Any, changes: dict[str, Any], message: str
) -> None:
    config = {
        describe_v2: V2_LITE,
        describe_v3: V3,
        describe_kimi_k25: K25,
        describe_glm4_moe_lite: GLM_47_FLASH,
    }[describe]
    with pytest.raises(ValueError, match=message):
        describe({**config, **changes})


def test_missing_keys_of_glm_4_7_flash_have_the_defaults_of_transformers() -> None:
    written = Glm4MoeLiteConfig().to_dict()
    required = {key: value for key, value in written.items() if key in LITE_SIZES}
    found, expected = (read_v3(glm4_moe_lite_config(each)) for each in (required, written))
    assert found.moe == expected.moe
    assert (found.query_rank, found.norm_eps) == (expected.query_rank, expected.norm_eps)


def test_layer_types_of_glm_4_7_flash_are_read() -> None:
    kinds = ["dense"] * 3 + ["sparse"] * 44
    config = glm4_moe_lite_config({**GLM_47_FLASH, "mlp_layer_types": kinds})
    assert read_v3(config).moe.layers == frozenset(range(3, 47))


def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    reference = save_reference("DeepseekV3", tmp_path, num_nextn_predict_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    draft = {
        f"model.layers.3.{name}": torch.zeros(1) for name in ("eh_proj.weight", "enorm.weight")
    }
    save_file({**weights, **draft}, tmp_path / "model.safetensors")
    found = checkpoint_logits(DEEPSEEK_V3, tmp_path, DenseBuild())
    torch.testing.assert_close(found, transformers_logits(reference), atol=1e-4, rtol=1e-4)


def test_join_of_multi_token_prediction_is_never_quantized(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    save_reference("DeepseekV3", tmp_path, num_nextn_predict_layers=1, **sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    build = QuantizedBuild(FP8_BLOCK)
    _, build.is_quantized = read_schemes(BLOCK_WISE)
    target = DeepseekV3ForCausalLM(config, build)
    build.problems.clear()
    DeepseekMTP(config, build, target)
    hidden = config["hidden_size"]
    join = {"in_size": 2 * hidden, "out_size": hidden, "dtype": "float32"}
    assert ("linear", join) in build.problems
    assert ("linear_fp8_block", join) not in build.problems
    assert "linear_fp8_block" in dict(build.problems), "the other layers are quantized"


def test_kimi_k25_language_model_is_found(tmp_path: Path) -> None:
    reference = save_reference("DeepseekV3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    published = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    published["vision_tower.patch_embed.proj.weight"] = torch.zeros(4)
    build = DenseBuild()
    model = KimiK25ForConditionalGeneration({"text_config": reference.config.to_dict()}, build)
    model.load_weights(published.items())
    tokens = torch.arange(3, 30)
    logits = model.logits(model.forward(tokens, torch.arange(27)))
    expected = transformers_logits(reference, tokens.tolist())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert KIMI_K25.load.endswith(KimiK25ForConditionalGeneration.__name__)


def test_block_wise_expansion_is_dequantized(tmp_path: Path) -> None:
    save_reference("DeepseekV3", tmp_path, kv_lora_rank=192)
    name = "model.layers.1.self_attn.kv_b_proj"
    weights = load_file(tmp_path / "model.safetensors")
    values, scale = quantize_blocks(weights[f"{name}.weight"])
    weights |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}
    save_file(weights, tmp_path / "model.safetensors")
    build = QuantizedBuild(FP8_BLOCK)
    build.is_quantized = lambda layer: layer == name
    model = load(DEEPSEEK_V3, tmp_path, build)
    assert isinstance(model, DeepseekV3ForCausalLM)
    found = model.layers[1].attention._kv_up.flatten(0, 1)
    expected = values.float() * spread_blocks(scale, *values.shape)
    assert relative(found, expected) < 1e-6


def test_block_wise_checkpoint_is_loaded(tmp_path: Path) -> None:
    sizes = {
        "q_lora_rank": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "initializer_range": 0.08,
    }
    # With all experts for each token, quantized activations do not change the choice.
    routing = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    reference = save_reference("DeepseekV3", tmp_path, **sizes, **routing)
    parameters, weights = dict(reference.named_parameters()), {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        weights[name] = tensor
        if tensor.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
            values, scale = quantize_blocks(tensor)
            weights |= {name: values, f"{name}_scale_inv": scale}
            tensor.copy_(values.float() * spread_blocks(scale, *values.shape))
            if name in parameters:
                parameters[name].data.copy_(tensor)
            else:
                stack(parameters, name, tensor)
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = BLOCK_WISE
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checkpoint_logits(DEEPSEEK_V3, tmp_path, QuantizedBuild(FP8_BLOCK))
    # Activations are quantized too.
    assert relative(found, transformers_logits(reference)) < 0.1


def stack(parameters: Any, name: str, tensor: torch.Tensor) -> None:
    """Copy an expert's weight into the stacked weight that transformers has."""
    prefix, _, rest = name.partition(".experts.")
    expert, projection, _ = rest.split(".")
    target = "down_proj" if projection == "down_proj" else "gate_up_proj"
    weight = parameters[f"{prefix}.experts.{target}"].data[int(expert)]
    if projection != "down_proj":
        weight = weight.chunk(2)[projection == "up_proj"]
    weight.copy_(tensor)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_fp8_cache_changes_logprobs_little(tmp_path: Path, scale: float | None) -> None:
    reference = save_reference("DeepseekV3", tmp_path, initializer_range=0.08)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 256}
    if scale is not None:
        factors = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": dict.fromkeys("012", scale)}}
        (tmp_path / "scales.json").write_text(json.dumps({"kv_cache": factors}))
        settings["quantization_param_path"] = str(tmp_path / "scales.json")
    with LLM(str(tmp_path), kv_cache_dtype="fp8_e4m3", chunked_prefill_size=16, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": TOKENS}, params)[0].outputs[0]
    logits = transformers_logits(reference, [*TOKENS, *output.token_ids])[len(TOKENS) - 1 : -1]
    errors = logprob_errors(output.logprobs or [], logits)
    assert 1e-6 < errors.max() < 0.05


def test_decodes_and_prefills_of_a_step_may_be_separate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save_reference("DeepseekV3", tmp_path)
    begin, parts = AttentionGroup.begin, []

    def record(group: AttentionGroup, inputs: Any) -> None:
        begin(group, inputs)
        parts.append([phase for phase, _, _ in group.batches])

    monkeypatch.setattr(AttentionGroup, "begin", record)
    # As on a device.
    is_split = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(AttentionGroup, "is_split", is_split, raising=False)
    prompts = [TOKENS[:length] for length in (3, 30, 40)]
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 256}
    with LLM(str(tmp_path), chunked_prefill_size=12, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert ["decode", "prefill"] in parts
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = transformers_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 1e-4


def test_chunk_multiplier_bounds_the_expanded_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save_reference("DeepseekV3", tmp_path)
    make, bounds = mla.mla_prefill, set()

    def recorded(problem: Any) -> Any:
        prefill = make(problem)

        def run(*operands: Any) -> None:
            max_expanded, num_entries = operands[8], max(operands[7])
            bounds.add((max_expanded, num_entries > max_expanded))
            prefill(*operands)

        return run

    monkeypatch.setattr(mla, "mla_prefill", recorded)
    for multiplier in (1, 3):
        settings: dict[str, Any] = {"chunked_prefill_size": 8, "max_num_seqs": 2}
        with LLM(
            str(tmp_path),
            skip_tokenizer_init=True,
            max_total_tokens=256,
            mla_chunk_multiplier=multiplier,
            **settings,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            tokens = llm.generate({"prompt_token_ids": TOKENS}, params)[0].outputs[0].token_ids
        logits = transformers_logits(reference, [*TOKENS, *tokens])[len(TOKENS) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 1e-4
    small, large = sorted({bound for bound, _ in bounds})
    assert large == 3 * small
    assert (small, True) in bounds, "earlier entries were expanded in several chunks"
