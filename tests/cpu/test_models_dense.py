"""Published configurations of Gemma, Phi and OLMo, and checkpoints in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_build import QuantizedBuild, checkpoint_logits, relative, transformers_logits
from tiny_families import save_reference
from tokenspeed_models_gemma import GEMMA3
from tokenspeed_models_gemma.describe import (
    describe_gemma2,
    describe_gemma3,
    describe_gemma3_multimodal,
    read_gemma3_multimodal,
)
from tokenspeed_models_gemma.model import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from tokenspeed_models_olmo import OLMO3
from tokenspeed_models_olmo.describe import describe_olmo2, describe_olmo3, read_olmo3
from tokenspeed_models_olmo.model import Olmo2ForCausalLM
from tokenspeed_models_phi import PHI3
from tokenspeed_models_phi.describe import describe_phi3, read_phi3
from tokenspeed_models_phi.model import Phi3ForCausalLM
from tokenspeed_quantization.schemes import FP8

from tokenspeed_core.api import CacheGroupSpec, FullAttention, ModelSpec, SlidingWindow
from tokenspeed_models.layers import inverse_frequencies, rotary_table
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.rope_config import LinearScaling, LongRopeScaling, YarnScaling
from tokenspeed_models.testing import DenseBuild, sequence_logits

Json = dict[str, Any]

GEMMA2_2B: Json = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA3_1B: Json = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# Its text configuration leaves out the keys that have the default of transformers.
GEMMA3_4B: Json = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI3_MINI_4K: Json = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
PHI4_MINI: Json = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + index for index in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
OLMO2_7B: Json = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
OLMO3_7B: Json = {
    **OLMO2_7B,
    "architectures": ["Olmo3ForCausalLM"],
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
OLMO3_7B["layer_types"] = OLMO3_7B["layer_types"] * 8


@pytest.mark.parametrize(
    ("describe", "config", "length", "num_parameters", "groups"),
    [
        (
            describe_gemma2,
            GEMMA2_2B,
            8192,
            2_614_341_888,
            (FullAttention("full", 13, 4, 256), SlidingWindow("window", 13, 4, 256, 4096)),
        ),
        (
            describe_gemma3,
            GEMMA3_1B,
            32768,
            999_885_952,
            (FullAttention("full", 4, 1, 256), SlidingWindow("window", 22, 1, 256, 512)),
        ),
        (
            describe_gemma3_multimodal,
            GEMMA3_4B,
            131072,
            3_880_263_168,
            (FullAttention("full", 5, 4, 256), SlidingWindow("window", 29, 4, 256, 1024)),
        ),
        (
            describe_phi3,
            PHI3_MINI_4K,
            4096,
            3_821_079_552,
            (SlidingWindow("window", 32, 32, 96, 2047),),
        ),
        (
            describe_phi3,
            PHI4_MINI,
            131072,
            3_836_021_760,
            (FullAttention("full", 32, 8, 128),),
        ),
        (
            describe_olmo2,
            OLMO2_7B,
            4096,
            7_298_617_344,
            (FullAttention("full", 32, 32, 128),),
        ),
        (
            describe_olmo3,
            OLMO3_7B,
            65536,
            7_298_011_136,
            (FullAttention("full", 8, 32, 128), SlidingWindow("window", 24, 32, 128, 4096)),
        ),
    ],
    ids=[
        "gemma2-2b",
        "gemma3-1b",
        "gemma3-4b",
        "phi3-mini-4k",
        "phi4-mini",
        "olmo2-7b",
        "olmo3-7b",
    ],
)
def test_published_configuration_is_described(
    describe: Any,
    config: Json,
    length: int,
    num_parameters: int,
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    info = describe(config)
    assert info.architecture == config["architectures"][0]
    assert (info.max_model_len, info.dtype) == (length, "bfloat16")
    assert info.cache_groups == groups
    eos = config["eos_token_id"]
    assert info.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert info.num_parameters == num_parameters
    text = config.get("text_config", config)
    settings = transformers.AutoConfig.for_model(**json.loads(json.dumps(text)))
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(settings)
    assert info.num_parameters == sum(each.numel() for each in reference.parameters())


def test_rotations_of_published_configurations() -> None:
    gemma = read_gemma3_multimodal(GEMMA3_4B)
    assert (gemma.decoder.rope.theta, gemma.decoder.rope.scaling) == (1e6, LinearScaling(8.0))
    assert (gemma.local_rope.theta, gemma.local_rope.scaling) == (1e4, None)
    olmo = read_olmo3(OLMO3_7B)
    assert isinstance(olmo.decoder.rope.scaling, YarnScaling)
    assert (olmo.local_rope.theta, olmo.local_rope.scaling) == (5e5, None)
    phi = read_phi3(PHI4_MINI).rope
    assert phi.size == 96
    assert isinstance(phi.scaling, LongRopeScaling)
    assert phi.scaling.attention_factor == pytest.approx(1.190238)
    long, _ = inverse_frequencies(phi)
    short = rotary_table(phi, torch.device("cpu"), 4096)
    assert long[1] == pytest.approx(0.5 * 10000 ** (-2 / 96))
    angle = torch.tensor(10000 ** (-2 / 96))
    torch.testing.assert_close(short[1, 1] / phi.scaling.attention_factor, angle.cos())


TINY_TEXT: Json = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_language_model_of_a_multimodal_checkpoint_is_loaded(prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    text = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TINY_TEXT)).eval()
    config = {"text_config": TINY_TEXT, "eos_token_id": [1, 2], "torch_dtype": "float32"}
    build = DenseBuild()
    model = Gemma3ForConditionalGeneration(config, build)
    weights = {
        f"{prefix}{name.removeprefix('model.')}": tensor
        for name, tensor in text.state_dict().items()
        if name != "lm_head.weight"
    }
    model.load_weights(
        {
            **weights,
            "vision_tower.vision_model.post_layernorm.weight": torch.zeros(3),
            "model.multi_modal_projector.mm_soft_emb_norm.weight": torch.zeros(3),
        }.items()
    )
    ids = list(range(3, 30))
    with torch.inference_mode():
        expected = text(torch.tensor([ids])).logits[0]
        found = sequence_logits(model, build, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class FusedRequests(DenseBuild):
    """A build that records the fused ops that a model asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_ops: set[str] = set()

    def fused(self, op: str, **problem: Any) -> None:
        self.fused_ops.add(op)


@pytest.mark.parametrize(
    ("model", "ops", "fused_ops"),
    [
        (
            Gemma3ForCausalLM,
            {
                "linear",
                "rms_norm",
                "add_rms_norm",
                "add_rms_norm_linear",
                "add_rms_norm_linear_gelu_tanh_mul",
                "qk_norm_rope",
            },
            set(),
        ),
        (
            Phi3ForCausalLM,
            {
                "linear",
                "rms_norm",
                "add_rms_norm",
                "add_rms_norm_linear",
                "add_rms_norm_linear_silu_mul",
                "rope",
            },
            {"fused_block", "fused_block_in_place"},
        ),
        (
            Olmo2ForCausalLM,
            {"linear", "rms_norm", "add_rms_norm", "silu_mul", "rope"},
            set(),
        ),
    ],
)
def test_family_requests_the_fused_ops_that_apply(
    model: Any, ops: set[str], fused_ops: set[str]
) -> None:
    build = FusedRequests()
    model(TINY_TEXT, build)
    assert {op for op, _ in build.problems} - {"attention"} == ops
    assert build.fused_ops == fused_ops


def test_norm_weights_with_an_offset_keep_their_low_bits() -> None:
    build = DenseBuild(torch.bfloat16)
    model = Gemma3ForCausalLM(TINY_TEXT, build)
    slots = {slot.name: slot for slot in model.weight_map()}
    weight = torch.full((48,), 2**-10, dtype=torch.bfloat16)
    slot = slots["model.layers.0.post_feedforward_layernorm.weight"]
    slot.fill(weight)
    assert slot.target.dtype == torch.float32
    assert torch.equal(slot.target, torch.full((48,), 1 + 2**-10))


def test_stacked_projections_keep_their_shards() -> None:
    config = {**TINY_TEXT, "tie_word_embeddings": True}
    slots = {slot.name: slot for slot in Phi3ForCausalLM(config, DenseBuild()).weight_map()}
    qkv = slots["model.layers.0.self_attn.qkv_proj.weight"]
    assert qkv.target.shape == (4 * 16 + 2 * 2 * 16, 48)
    parts = [(size, shard.num_heads) for size, shard in qkv.shard.parts]  # type: ignore[union-attr]
    assert parts == [(64, 4), (32, 2), (32, 2)]
    assert slots["model.layers.0.mlp.gate_up_proj.weight"].target.shape == (112, 48)


@pytest.mark.parametrize(
    ("describe", "config", "message"),
    [
        (
            describe_gemma3,
            {**GEMMA3_1B, "hidden_activation": "gelu"},
            "hidden_activation is 'gelu'",
        ),
        (
            describe_gemma3_multimodal,
            {"text_config": {**GEMMA3_1B, "use_bidirectional_attention": True}},
            "use_bidirectional_attention is true",
        ),
        (describe_gemma3_multimodal, {"text_config": None}, "text_config is None"),
        (describe_olmo3, {**OLMO3_7B, "layer_types": ["full_attention"]}, "layer_types is"),
        (
            describe_phi3,
            {**PHI4_MINI, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            r"rope_scaling\.short_factor is \[1\.0\], expected a list of 48 numbers",
        ),
        (describe_phi3, {**PHI3_MINI_4K, "sliding_window": 0}, "sliding_window is 0"),
        *(
            (describe_phi3, {**PHI4_MINI, key: True}, f"{key} is True")
            for key in ("attention_bias", "mlp_bias", "lm_head_bias")
        ),
    ],
)
def test_unsupported_value_is_named_by_its_key(describe: Any, config: Json, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(config)


@pytest.mark.parametrize("is_tied", [True, False])
def test_multimodal_checkpoint_of_transformers_loads_unchanged(
    is_tied: bool, tmp_path: Path
) -> None:
    """The safetensors layout that transformers writes for a multimodal checkpoint loads unchanged."""
    torch.manual_seed(7)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    settings = transformers.Gemma3Config(
        text_config=TINY_TEXT,
        vision_config=vision,
        mm_tokens_per_image=1,
        tie_word_embeddings=is_tied,
    )
    reference = transformers.Gemma3ForConditionalGeneration(settings).eval()
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    build = DenseBuild()
    model = Gemma3ForConditionalGeneration(config, build)
    model.load_weights(read_safetensors(str(tmp_path), model, lambda done, total: None))
    ids = list(range(3, 30))
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids])).logits[0]
        found = sequence_logits(model, build, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "spec", "gate"),
    [
        ("Gemma3", GEMMA3, "gelu_tanh_mul"),
        ("Olmo3", OLMO3, "silu_mul_fp8"),
        ("Phi3", PHI3, "add_rms_norm_mlp_fp8"),
    ],
)
def test_fp8_logits_are_close_to_the_unquantized_model(
    family: str, spec: ModelSpec, gate: str, tmp_path: Path
) -> None:
    reference = save_reference(family, tmp_path, initializer_range=0.08)
    build = QuantizedBuild(FP8)
    found = checkpoint_logits(spec, tmp_path, build)
    # three or four layers of random weights; each GEMM is off by about 4 %
    assert 0.01 < relative(found, transformers_logits(reference)) < 0.2
    ops = {op for op, _ in build.problems}
    assert gate in ops
    assert ("add_rms_norm_mlp_fp8" in ops) == (family == "Phi3")
