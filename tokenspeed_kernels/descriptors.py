"""Descriptors of this distribution's kernels: capabilities and where to load them. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec

_FLOATS = ("float32", "bfloat16", "float16")
_HALVES = ("bfloat16", "float16")
_FP8 = ("float8_e4m3fn",)
_GRAPH_SAFE = frozenset({"graph_safe"})
_BATCH_INVARIANT = frozenset({"graph_safe", "batch_invariant"})
_MAX_IN_SIZE = (AxisLimit("in_size", 1, 16384),)


def _torch(op: str, load: str, features: frozenset[str] = _GRAPH_SAFE) -> KernelSpec:
    return KernelSpec(
        op=op,
        backend="torch",
        capability=Capability(
            platforms=("cpu", "cuda"),
            dtypes=_FLOATS,
            kv_dtypes=_FLOATS + _FP8,
            features=features,
        ),
        load=f"tokenspeed_kernels.reference.{load}",
        reference=True,
    )


def _cpu(
    op: str, load: str, features: frozenset[str], limits: tuple[AxisLimit, ...] = ()
) -> KernelSpec:
    """Describe a kernel that is faster on a CPU than the op's reference. It belongs to the same backend."""
    return KernelSpec(
        op=op,
        backend="torch",
        capability=Capability(platforms=("cpu",), dtypes=_FLOATS, features=features, limits=limits),
        load=f"tokenspeed_kernels.cpu.{load}",
    )


def _triton(
    op: str,
    load: str,
    features: frozenset[str] = _BATCH_INVARIANT,
    limits: tuple[AxisLimit, ...] = (),
    dtypes: tuple[str, ...] = _FLOATS,
    capability: tuple[int, int] = (8, 0),
    kv_dtypes: tuple[str, ...] = _FLOATS,
    options: str = "",
) -> KernelSpec:
    return KernelSpec(
        op=op,
        backend="triton",
        capability=Capability(
            platforms=("cuda",),
            min_compute_capability=capability,
            dtypes=dtypes,
            kv_dtypes=kv_dtypes,
            features=features,
            limits=limits,
        ),
        load=f"tokenspeed_kernels.triton.{load}",
        requires=("triton",),
        options=options,
    )


def _gemv(op: str) -> KernelSpec:
    """Describe a GEMV kernel. Measured on Hopper only; with several rows it calls torch's GEMM."""
    return KernelSpec(
        op=op,
        backend="triton",
        capability=Capability(
            platforms=("cuda",),
            min_compute_capability=(9, 0),
            max_compute_capability=(9, 9),
            dtypes=_HALVES,
            features=_GRAPH_SAFE,
            limits=_MAX_IN_SIZE,
        ),
        load=f"tokenspeed_kernels.triton.linear.gemv:{op}",
        requires=("triton",),
    )


def _fused_block(op: str, rows: AxisLimit, *, max_hidden: int) -> KernelSpec:
    """Describe a fused decoder block kernel. Measured on Hopper only."""
    sizes = (
        AxisLimit(axis, 64, 16384, multiple_of=64)
        for axis in ("in_size", "intermediate_size", "out_size")
    )
    return KernelSpec(
        op=op,
        backend="triton",
        capability=Capability(
            platforms=("cuda",),
            min_compute_capability=(9, 0),
            max_compute_capability=(9, 9),
            dtypes=_HALVES,
            features=_GRAPH_SAFE,
            limits=(*sizes, AxisLimit("hidden_size", 64, max_hidden, multiple_of=64), rows),
        ),
        load=f"tokenspeed_kernels.triton.fused.{op}:{op}",
        requires=("triton",),
    )


TORCH_NORM = (
    _torch("rms_norm", "norm:rms_norm"),
    _torch("add_rms_norm", "norm:add_rms_norm"),
    _torch("add_rms_norm_fp8", "fp8:add_rms_norm_fp8"),
    _torch("add_rms_norm_fp8_groups", "fp8_block:add_rms_norm_fp8_groups"),
)
TORCH_ROPE = (
    _torch("rope", "rope:rope"),
    _torch("qk_norm_rope", "rope:qk_norm_rope"),
)
TORCH_ACTIVATION = (
    _torch("silu_mul", "activation:silu_mul"),
    _torch("gelu_tanh_mul", "activation:gelu_tanh_mul"),
    _torch("silu_mul_fp8", "fp8:silu_mul_fp8"),
    _torch("silu_mul_fp8_groups", "fp8_block:silu_mul_fp8_groups"),
)
TORCH_LINEAR = (
    _torch("linear", "linear:linear"),
    _torch("add_rms_norm_linear", "fused_linear:add_rms_norm_linear"),
    _torch("add_rms_norm_linear_silu_mul", "fused_linear:add_rms_norm_linear_silu_mul"),
    _torch("add_rms_norm_linear_gelu_tanh_mul", "fused_linear:add_rms_norm_linear_gelu_tanh_mul"),
    _torch("quantize_fp8", "fp8:quantize_fp8"),
    _torch("linear_fp8", "fp8:linear_fp8"),
    _torch("quantize_linear_fp8", "fp8:quantize_linear_fp8"),
    _torch("add_rms_norm_linear_fp8", "fp8:add_rms_norm_linear_fp8"),
    _torch("add_rms_norm_mlp_fp8", "fp8:add_rms_norm_mlp_fp8"),
    _torch("quantize_fp8_groups", "fp8_block:quantize_fp8_groups"),
    _torch("quantize_fp8_blocks", "fp8_block:quantize_fp8_blocks"),
    _torch("linear_fp8_block", "fp8_block:linear_fp8_block"),
    _torch("quantize_fp8_static", "fp8:quantize_fp8_static"),
    _torch("quantize_int8", "int8:quantize_int8"),
    _torch("quantize_int8_static", "int8:quantize_int8_static"),
    _torch("linear_int8", "int8:linear_int8"),
    _torch("linear_w4a16", "w4a16:linear_w4a16"),
    _torch("linear_mxfp4", "w4a16:linear_mxfp4"),
    _torch("mla_absorb", "mla:mla_absorb"),
    _torch("mla_project", "mla:mla_project"),
)
TORCH_MOE = (
    _torch("moe_route", "moe:moe_route"),
    _torch("moe_logits", "moe:moe_logits"),
    _torch("moe_experts", "moe:moe_experts", frozenset()),
    *(
        _torch(op, f"moe_w8a8:{op}", frozenset())
        for op in (
            "moe_experts_fp8",
            "moe_experts_fp8_block",
            "moe_experts_fp8_static",
            "moe_experts_int8",
            "moe_experts_int8_static",
        )
    ),
    _torch("moe_experts_w4a16", "moe_w4a16:moe_experts_w4a16", frozenset()),
    _torch("moe_experts_mxfp4", "moe_w4a16:moe_experts_mxfp4", frozenset()),
    _torch("moe_biased_experts", "biased_experts:moe_biased_experts", frozenset()),
    _torch("moe_biased_experts_mxfp4", "biased_experts:moe_biased_experts_mxfp4", frozenset()),
)
TORCH_CACHE = (
    _torch("write_kv", "cache:write_kv", frozenset({"value_head_size"})),
    _torch("advance_rows", "cache:advance_rows"),
    _torch("map_tokens", "cache:map_tokens"),
    _torch("gather_tokens", "cache:gather_tokens"),
    _cpu("advance_rows", "step:advance_rows", _GRAPH_SAFE),
    _cpu("gather_tokens", "step:gather_tokens", _GRAPH_SAFE),
    _cpu("map_tokens", "step:map_tokens", _GRAPH_SAFE),
    _torch("mla_write", "mla:mla_write", frozenset()),
    _torch("find_shared_prefix", "cache:find_shared_prefix"),
)
_VALUES = frozenset({"value_head_size"})
_SCORES = frozenset({"window", "chunked", "soft_cap", "sinks", "bidirectional"}) | _VALUES
TORCH_ATTENTION = (
    _torch("attention", "attention:attention", _SCORES),
    _torch("mla_decode", "mla:mla_decode"),
    _torch("mla_prefill", "mla:mla_prefill", frozenset()),
)
TORCH_SAMPLING = (
    _torch("greedy", "sampling:greedy"),
    _torch("sample", "sampling:sample"),
    _torch("note_tokens", "sampling:note_tokens"),
    _torch("mask_logits", "sampling:mask_logits"),
    _torch("verify_drafts", "sampling:verify_drafts"),
    _cpu("sample", "sampling:sample", _BATCH_INVARIANT, (AxisLimit("vocab_size", 257),)),
)

_ONE_BLOCK = (AxisLimit("size", 1, 16384),)
_ONE_LONG_BLOCK = (AxisLimit("size", 1, 32768),)
_EXPERTS = (AxisLimit("num_experts", 1, 1024),)
_W8A8_EXPERTS = (
    *_EXPERTS,
    AxisLimit("hidden_size", 16, 32768, multiple_of=16),
    AxisLimit("intermediate_size", 16, 32768, multiple_of=16),
)
_FP8_BLOCK_EXPERTS = (
    *_EXPERTS,
    AxisLimit("hidden_size", 16, 32768, multiple_of=16),
    AxisLimit("intermediate_size", 128, 32768, multiple_of=128),
)
_MXFP4_EXPERTS = (
    *_EXPERTS,
    AxisLimit("hidden_size", 32, multiple_of=32),
    AxisLimit("intermediate_size", 32, multiple_of=32),
)
_FP8_CAPABILITY = (8, 9)  # the first compute capability with e4m3
_FP8_SIZES = (AxisLimit("in_size", 16, multiple_of=16), AxisLimit("out_size", 16, multiple_of=16))
_FP8_ROW = (
    AxisLimit("in_size", 16, 16384, multiple_of=16),
    AxisLimit("out_size", 16, multiple_of=16),
)
_FP8_MLP = (
    AxisLimit("hidden_size", 16, 16384, multiple_of=16),
    AxisLimit("size", 16, 16384, multiple_of=16),
)

TRITON_NORM = (
    _triton("rms_norm", "norm.rms_norm:rms_norm", limits=_ONE_BLOCK),
    _triton("add_rms_norm", "norm.rms_norm:add_rms_norm", limits=_ONE_BLOCK),
    _triton(
        "add_rms_norm_fp8",
        "quantize.fp8_per_token:add_rms_norm_fp8",
        limits=_ONE_BLOCK,
        capability=_FP8_CAPABILITY,
    ),
    _triton(
        "add_rms_norm_fp8_groups",
        "quantize.fp8_per_group:add_rms_norm_fp8_groups",
        limits=_ONE_BLOCK,
        capability=_FP8_CAPABILITY,
    ),
)
TRITON_ROPE = (
    _triton("rope", "rope.rope:rope"),
    _triton("qk_norm_rope", "rope.rope:qk_norm_rope"),
)
TRITON_ACTIVATION = (
    _triton("silu_mul", "activation.gated:silu_mul"),
    _triton("gelu_tanh_mul", "activation.gated:gelu_tanh_mul"),
    _triton(
        "silu_mul_fp8",
        "quantize.fp8_per_token:silu_mul_fp8",
        limits=_ONE_LONG_BLOCK,
        capability=_FP8_CAPABILITY,
    ),
    _triton(
        "silu_mul_fp8_groups",
        "quantize.fp8_per_group:silu_mul_fp8_groups",
        capability=_FP8_CAPABILITY,
    ),
)
TRITON_LINEAR = (
    _triton("mla_absorb", "mla.heads:mla_absorb", _GRAPH_SAFE),
    _triton("mla_project", "mla.heads:mla_project", _GRAPH_SAFE),
    _fused_block("fused_block", AxisLimit("max_rows", 1, 64), max_hidden=4096),
    _fused_block("fused_block_in_place", AxisLimit("min_rows", 512), max_hidden=16384),
    _gemv("linear"),
    _gemv("linear_silu_mul"),
    _gemv("add_rms_norm_linear"),
    _gemv("add_rms_norm_linear_silu_mul"),
    _gemv("add_rms_norm_linear_gelu_tanh_mul"),
    _triton("linear_add", "linear.gemm:linear_add", _GRAPH_SAFE),
    _triton("add_rms_norm_linear", "linear.gemm:add_rms_norm_linear", _GRAPH_SAFE, _MAX_IN_SIZE),
    _triton(
        "add_rms_norm_linear_silu_mul",
        "linear.gemm:add_rms_norm_linear_silu_mul",
        _GRAPH_SAFE,
        _MAX_IN_SIZE,
    ),
    _triton(
        "add_rms_norm_linear_gelu_tanh_mul",
        "linear.gemm:add_rms_norm_linear_gelu_tanh_mul",
        _GRAPH_SAFE,
        _MAX_IN_SIZE,
    ),
    _triton(
        "quantize_fp8",
        "quantize.fp8_per_token:quantize_fp8",
        limits=_ONE_LONG_BLOCK,
        capability=_FP8_CAPABILITY,
    ),
    _triton(
        "linear_fp8",
        "linear.gemm_fp8:linear_fp8",
        _GRAPH_SAFE,
        _FP8_SIZES,
        ("bfloat16",),
        _FP8_CAPABILITY,
    ),
    _triton(
        "quantize_fp8_groups",
        "quantize.fp8_per_group:quantize_fp8_groups",
        capability=_FP8_CAPABILITY,
    ),
    _triton(
        "linear_fp8_block",
        "linear.gemm_fp8_block:linear_fp8_block",
        _GRAPH_SAFE,
        _FP8_SIZES,
        capability=_FP8_CAPABILITY,
    ),
    _triton(
        "linear_w4a16",
        "linear.gemm_w4a16:linear_w4a16",
        _GRAPH_SAFE,
        (AxisLimit("in_size", 32, multiple_of=32), AxisLimit("group_size", 0, multiple_of=32)),
        _HALVES,
    ),
    _triton(
        "linear_mxfp4",
        "linear.gemm_w4a16:linear_mxfp4",
        _GRAPH_SAFE,
        (AxisLimit("in_size", 32, multiple_of=32),),
        _HALVES,
    ),
    _triton("linear_int8", "linear.gemm_int8:linear_int8", _GRAPH_SAFE),
    _triton("quantize_int8", "quantize.integer:quantize_int8", limits=_ONE_LONG_BLOCK),
    _triton(
        "quantize_int8_static", "quantize.integer:quantize_int8_static", limits=_ONE_LONG_BLOCK
    ),
    _triton(
        "quantize_fp8_static",
        "quantize.integer:quantize_fp8_static",
        limits=_ONE_LONG_BLOCK,
        capability=_FP8_CAPABILITY,
    ),
    *(
        _triton(op, f"linear.gemv_fp8:{op}", _GRAPH_SAFE, limits, ("bfloat16",), _FP8_CAPABILITY)
        for op, limits in (
            ("quantize_linear_fp8", _FP8_ROW),
            ("add_rms_norm_linear_fp8", _FP8_ROW),
            ("add_rms_norm_mlp_fp8", _FP8_MLP),
        )
    ),
)
TRITON_MOE = (
    _triton("moe_route", "moe.experts:moe_route", limits=_EXPERTS),
    _triton(
        "moe_logits",
        "moe.logits:moe_logits",
        _GRAPH_SAFE,
        (AxisLimit("hidden_size", 1, 16384),),
    ),
    _triton("moe_experts", "moe.experts:moe_experts", _GRAPH_SAFE, _EXPERTS),
    _triton("moe_biased_experts", "moe.biased_experts:moe_biased_experts", _GRAPH_SAFE, _EXPERTS),
    _triton(
        "moe_biased_experts_mxfp4",
        "moe.biased_experts:moe_biased_experts_mxfp4",
        _GRAPH_SAFE,
        _MXFP4_EXPERTS,
    ),
    _triton(
        "moe_experts_w4a16",
        "moe.experts_w4a16:moe_experts_w4a16",
        _GRAPH_SAFE,
        (
            *_EXPERTS,
            AxisLimit("hidden_size", 32, multiple_of=32),
            AxisLimit("intermediate_size", 32, multiple_of=32),
            AxisLimit("group_size", 0, multiple_of=32),
        ),
        _HALVES,
    ),
    _triton(
        "moe_experts_mxfp4",
        "moe.experts_w4a16:moe_experts_mxfp4",
        _GRAPH_SAFE,
        _MXFP4_EXPERTS,
        _HALVES,
    ),
    *(
        _triton(op, f"moe.experts_w8a8:{op}", _GRAPH_SAFE, limits, _HALVES, capability)
        for op, limits, capability in (
            ("moe_experts_fp8", _W8A8_EXPERTS, _FP8_CAPABILITY),
            ("moe_experts_fp8_block", _FP8_BLOCK_EXPERTS, _FP8_CAPABILITY),
            ("moe_experts_fp8_static", _W8A8_EXPERTS, _FP8_CAPABILITY),
            ("moe_experts_int8", _W8A8_EXPERTS, (8, 0)),
            ("moe_experts_int8_static", _W8A8_EXPERTS, (8, 0)),
        )
    ),
)
TRITON_CACHE = (
    _triton("mla_write", "mla.write:mla_write"),
    _triton("mla_write", "mla.write:mla_write", capability=_FP8_CAPABILITY, kv_dtypes=_FP8),
    *(
        _triton(
            "write_kv",
            "attention.write_kv:write_kv",
            _BATCH_INVARIANT | _VALUES,
            capability=capability,
            kv_dtypes=kv_dtypes,
        )
        for capability, kv_dtypes in (((8, 0), _FLOATS), (_FP8_CAPABILITY, _FP8))
    ),
    _triton("advance_rows", "step:advance_rows", _GRAPH_SAFE),
    _triton("map_tokens", "step:map_tokens", _GRAPH_SAFE),
    _triton(
        "find_shared_prefix",
        "attention.shared_prefix:find_shared_prefix",
        _GRAPH_SAFE,
        options="tokenspeed_kernels.options:SharedPrefixOptions",
    ),
    _triton("gather_tokens", "drafts:gather_tokens", _GRAPH_SAFE),
    _triton("rope_write_kv", "rope.rope_write_kv:rope_write_kv"),
    _triton("qk_norm_rope_write_kv", "rope.rope_write_kv:qk_norm_rope_write_kv"),
)
_HEAD_SIZES = (AxisLimit("head_size", 1, 256), AxisLimit("value_head_size", 1, 256))
_ATTENTION_OPTIONS = "tokenspeed_kernels.options:AttentionOptions"
TRITON_ATTENTION = (
    _triton(
        "attention",
        "attention.backend:attention",
        _SCORES | _GRAPH_SAFE,
        _HEAD_SIZES,
        options=_ATTENTION_OPTIONS,
    ),
    _triton(
        "attention",
        "attention.backend:attention",
        _SCORES | _GRAPH_SAFE,
        _HEAD_SIZES,
        capability=_FP8_CAPABILITY,
        kv_dtypes=_FP8,
        options=_ATTENTION_OPTIONS,
    ),
    *(
        _triton(op, f"mla.{module}:{op}", features, capability=capability, kv_dtypes=kv_dtypes)
        for op, module, features in (
            ("mla_decode", "absorbed", _GRAPH_SAFE | {"shared_prefix"}),
            ("mla_prefill", "prefill", _GRAPH_SAFE),
        )
        for capability, kv_dtypes in (((8, 0), _FLOATS), (_FP8_CAPABILITY, _FP8))
    ),
)
TRITON_SAMPLING = (
    _triton("greedy", "sampling.sample:greedy"),
    _triton("sample", "sampling.sample:sample"),
    _triton("note_tokens", "step:note_tokens"),
    _triton("verify_drafts", "drafts:verify_drafts", _GRAPH_SAFE),
    _triton("mask_logits", "sampling.mask:mask_logits"),
)
