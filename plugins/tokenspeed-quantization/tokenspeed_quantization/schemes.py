"""The schemes of these methods: how a linear layer is stored, and the ops that compute with it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_core.api import FUSED_OP, Axis, Packing, QuantizationScheme, StoredTensor

REPACK = "tokenspeed_quantization.repack"
OUT, IN, ONE = Axis("out"), Axis("in"), Axis("out", 0)
_MIN_GROUP = 32  # of the op `linear_w4a16`

FP8 = QuantizationScheme(
    name="fp8",
    dtype="float8_e4m3fn",
    quantize="quantize_fp8",
    linear="linear_fp8",
    fused={
        "add_rms_norm": "add_rms_norm_fp8",
        FUSED_OP: "all_reduce_add_rms_norm_fp8",
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
        FUSED_OP: "all_reduce_add_rms_norm_fp8_groups",
        "silu_mul": "silu_mul_fp8_groups",
        "moe_experts": "moe_experts_fp8_block",
    },
    quantize_weight="quantize_fp8_blocks",
    scale_block=(128, 128),
    scale_name="weight_scale_inv",
)
INT8 = QuantizationScheme(
    name="int8",
    dtype="int8",
    quantize="quantize_int8",
    linear="linear_int8",
    fused={"moe_experts": "moe_experts_int8"},
)


def fp8_stored(
    *,
    per_channel: bool,
    static: bool,
    weight_scale: str = "weight_scale",
    input_scale: str = "input_scale",
) -> QuantizationScheme:
    """Return the scheme of FP8 weights with per-channel or per-tensor scales, and per-token or static activations.

    Per-tensor scales become one scale per row, so that stacked projections keep their own.
    """
    name = "fp8" if per_channel else "fp8 per-tensor"
    typical = 2e-4  # times the values of random weights, a usual deviation
    packing = _scaled("float8_e4m3fn", per_channel, static, weight_scale, input_scale, typical)
    if not static:
        return QuantizationScheme(
            name, FP8.dtype, FP8.quantize, FP8.linear, FP8.fused, packing=packing
        )
    return QuantizationScheme(
        f"{name} static",
        FP8.dtype,
        "quantize_fp8_static",
        FP8.linear,
        {"moe_experts": "moe_experts_fp8_static"},
        packing=packing,
    )


def int8_stored(*, per_channel: bool, static: bool) -> QuantizationScheme:
    """Return the scheme of INT8 weights with per-channel or per-tensor scales, and per-token or static activations."""
    name = "int8" if per_channel else "int8 per-tensor"
    packing = _scaled("int8", per_channel, static, "weight_scale", "input_scale", 3e-4)
    if not static:
        return QuantizationScheme(
            name, INT8.dtype, INT8.quantize, INT8.linear, INT8.fused, packing=packing
        )
    return QuantizationScheme(
        f"{name} static",
        INT8.dtype,
        "quantize_int8_static",
        INT8.linear,
        {"moe_experts": "moe_experts_int8_static"},
        packing=packing,
    )


def _scaled(
    dtype: str,
    per_channel: bool,
    static: bool,
    weight_scale: str,
    input_scale: str,
    typical: float,
) -> Packing:
    rows = OUT if per_channel else ONE
    stored = [
        StoredTensor("weight", dtype, (OUT, IN)),
        StoredTensor(weight_scale, "float32", (rows, ONE), "scale", typical=typical),
    ]
    input_operands = []
    if static:
        stored.append(StoredTensor(input_scale, "float32", (ONE,), "scale", typical=0.02))
        input_operands.append(StoredTensor("input_scale", "float32", (ONE,)))
    # Static checkpoints of some tools are treated as dynamic only if their configuration declares it.
    return Packing(
        tuple(stored),
        (StoredTensor("weight", dtype, (OUT, IN)), StoredTensor("scale", "float32", (OUT, ONE))),
        tuple(input_operands),
        f"{REPACK}:scaled",
    )


def mxfp4_stored() -> QuantizationScheme:
    """Return the scheme of E2M1 weights in groups of 32 with power-of-two scales, as compressed-tensors stores them."""
    halves, groups = Axis("in", 2), Axis("in", 32)
    return QuantizationScheme(
        name="mxfp4",
        dtype="uint8",
        quantize=None,
        linear="linear_mxfp4",
        fused={"moe_experts": "moe_experts_mxfp4"},
        packing=Packing(
            (
                StoredTensor("weight_packed", "uint8", (OUT, halves)),
                StoredTensor("weight_scale", "uint8", (OUT, groups), "scale", typical=119),
            ),
            (
                StoredTensor("weight", "uint8", (OUT, halves)),
                StoredTensor("scale", "uint8", (OUT, groups)),
            ),
            repack=f"{REPACK}:mxfp4",
        ),
    )


def int4(
    writer: str,
    stored: Sequence[StoredTensor],
    group_size: int,
    *,
    has_zeros: bool,
    has_order: bool,
) -> QuantizationScheme:
    """Return the scheme of 4-bit weights in groups of `group_size` columns (0: one group), repacked from a writer's form.

    Raises ValueError for groups that no kernel supports.
    """
    if group_size % _MIN_GROUP or group_size < 0:
        raise ValueError(
            f"group_size is {group_size}. Supported: multiples of {_MIN_GROUP}, and -1."
        )
    groups = Axis("in", group_size)
    words = ["int4", f"group {group_size}" if group_size else "per-channel"]
    words += ["zero points"] * has_zeros + ["activation order"] * has_order
    return QuantizationScheme(
        name=", ".join(words),
        dtype="uint8",
        quantize=None,
        linear="linear_w4a16",
        fused={"moe_experts": "moe_experts_w4a16"},
        packing=Packing(
            tuple(stored),
            (
                StoredTensor("weight", "uint8", (OUT, Axis("in", 2))),
                StoredTensor("scale", "float", (OUT, groups)),
                StoredTensor("zero", "uint8", (OUT, groups)) if has_zeros else None,
                StoredTensor("order", "int32", (IN,)) if has_order else None,
            ),
            repack=f"{REPACK}:{writer}",
        ),
        problem={"group_size": group_size},
    )


# Two values in a byte, and a scale for each 32. Experts alone are stored like this.
MXFP4 = QuantizationScheme(
    name="mxfp4",
    dtype="uint8",
    quantize=None,
    linear=None,
    fused={"moe_biased_experts": "moe_biased_experts_mxfp4"},
)
