"""The schemes of these methods: how a linear layer is stored, and the ops that compute with it."""

from __future__ import annotations

from tokenspeed_core.api import QuantizationScheme

FP8 = QuantizationScheme(
    name="fp8",
    dtype="float8_e4m3fn",
    quantize="quantize_fp8",
    linear="linear_fp8",
    fused={
        "add_rms_norm": "add_rms_norm_fp8",
        "silu_mul": "silu_mul_fp8",
        "linear": "quantize_linear_fp8",
        "add_rms_norm_linear": "add_rms_norm_linear_fp8",
        "add_rms_norm_mlp": "add_rms_norm_mlp_fp8",
        "moe_experts": "moe_experts_fp8",
    },
)
FP8_BLOCK = QuantizationScheme(
    name="fp8-block",
    dtype="float8_e4m3fn",
    quantize="quantize_fp8_groups",
    linear="linear_fp8_block",
    fused={
        "add_rms_norm": "add_rms_norm_fp8_groups",
        "silu_mul": "silu_mul_fp8_groups",
        "moe_experts": "moe_experts_fp8_block",
    },
    quantize_weight="quantize_fp8_blocks",
    scale_block=(128, 128),
    scale_name="weight_scale_inv",
)
