"""gpt-oss: published configurations, checkpoints with MXFP4 experts, and errors in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_build import TOKENS, QuantizedBuild, checkpoint_logits, load, transformers_logits
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_models_gpt_oss import GPT_OSS
from tokenspeed_models_gpt_oss.describe import describe_gpt_oss, read_gpt_oss
from tokenspeed_quantization.schemes import FP8, MXFP4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import FullAttention, SlidingWindow
from tokenspeed_models.rope_config import YarnScaling

MXFP4_SETTINGS: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": MXFP4_SETTINGS,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_published_configuration_is_described() -> None:
    info = describe_gpt_oss(GPT_OSS_20B)
    assert (info.dtype, info.max_model_len, info.eos_token_ids) == ("bfloat16", 131072, (200002,))
    assert info.cache_groups == (
        FullAttention("full", 12, 8, 64),
        SlidingWindow("window", 12, 8, 64, 128),
    )
    assert info.num_parameters == 20_914_757_184
    c = read_gpt_oss(GPT_OSS_20B)
    assert (c.alpha, c.limit) == (1.702, 7.0)
    assert isinstance(c.decoder.rope.scaling, YarnScaling) and not c.decoder.rope.scaling.truncate


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    optional = ("head_dim", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit")
    optional += ("attention_bias", "layer_types", "num_key_value_heads", "rms_norm_eps")
    short = {key: value for key, value in GPT_OSS_20B.items() if key not in optional}
    assert read_gpt_oss(short) == read_gpt_oss(GPT_OSS_20B)


def save_mxfp4(folder: Path) -> Any:
    """Write a checkpoint in the published layout and return transformers' model of the same values."""
    reference = save_reference("GptOss", folder)
    config, stored = folder / "config.json", folder / "model.safetensors"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "quantization_config": MXFP4_SETTINGS}))
    tensors = load_file(stored)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, size, rows = tensors.pop(name).shape
        shape = (num_experts, rows, size // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        with torch.no_grad():
            reference.get_parameter(name).copy_(values)
    save_file(tensors, stored, metadata={"format": "pt"})
    return reference


def test_mxfp4_logits_equal_transformers(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path)
    build = QuantizedBuild(MXFP4)
    found = checkpoint_logits(GPT_OSS, tmp_path, build)
    torch.testing.assert_close(found, transformers_logits(reference), rtol=1e-4, atol=1e-4)
    ops = {op for op, _ in build.problems}
    assert "moe_biased_experts_mxfp4" in ops and "moe_biased_experts" not in ops


def test_mxfp4_checkpoint_is_served(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True, chunked_prefill_size=16, block_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        tokens = [
            llm.generate({"prompt_token_ids": TOKENS}, params)[0].outputs[0].token_ids
            for _ in range(2)  # the second time with a prefix hit
        ]
        (experts,) = llm.kernel_plan.find("moe_biased_experts_mxfp4")
    assert experts.layers == (0, 1, 2)
    assert tokens[0] == tokens[1]
    logits = transformers_logits(reference, [*TOKENS, *tokens[0]])[len(TOKENS) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens[0])[:, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() <= 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": None}, r"missing: model\.layers\.1\.mlp\.experts\.down_proj_scales"),
        ({"gate_up_proj_bias": None}, r"missing: .*layers\.1\.mlp\.experts\.gate_up_proj_bias"),
        (
            {"down_proj_blocks": torch.zeros(6, 64, 2, 8, dtype=torch.uint8)},
            r"down_proj_blocks has shape \[6, 64, 2, 8\], expected \[6, 64, 1, 16\]",
        ),
        ({"down_proj_scales": torch.zeros(6, 64, 1)}, r"down_proj_scales is torch\.float32"),
        (
            {"down_proj_blocks": torch.zeros(5, 64, 1, 16, dtype=torch.uint8)},
            r"down_proj_blocks has shape \[5, 64, 1, 16\], expected \[6, 64, 1, 16\]",
        ),
        ({"../router.weight": torch.zeros(5, 64)}, r"router.weight has shape \[5, 64\]"),
    ],
)
def test_bad_expert_is_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    save_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in change.items():
        full_name = f"model.layers.1.mlp.experts.{name}".replace("experts.../", "")
        del tensors[full_name]
        tensors |= {} if tensor is None else {full_name: tensor}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(GPT_OSS, tmp_path, QuantizedBuild(MXFP4))


def test_other_quantization_of_experts_is_refused(tmp_path: Path) -> None:
    save_reference("GptOss", tmp_path)
    with pytest.raises(ValueError, match="fp8 does not support the experts of gpt-oss"):
        load(GPT_OSS, tmp_path, QuantizedBuild(FP8))
