"""Descriptors of the Blackwell kernels (compute capability 10.0 to 10.3). Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec

__all__ = [
    "BLACKWELL_ATTENTION",
    "BLOCK_SCALED",
    "MOE",
    "FA4",
    "FLASHINFER",
    "FLASHINFER_MLA",
    "MLA",
    "PREFILL",
    "TOKENSPEED_MLA",
    "TORCH_BLOCKS",
    "TORCH_MOE",
]

_HALVES = ("bfloat16", "float16")
_MIN_CAPABILITY, _MAX_CAPABILITY = (10, 0), (10, 3)
_OBTAIN_FLASHINFER = "pip install 'tokenspeed-kernels-blackwell[flashinfer]'"

PREFILL = KernelSpec(
    op="attention",
    backend="blackwell",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=_MIN_CAPABILITY,
        max_compute_capability=_MAX_CAPABILITY,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        head_sizes=(64, 128, 256),
        block_sizes=(64,),  # one TMA load
        phases=("prefill",),
        features=frozenset({"graph_safe", "window"}),
    ),
    load="tokenspeed_kernels_blackwell.attention.prefill:attention",
    requires=("triton",),
)

FLASHINFER = KernelSpec(
    op="attention",
    backend="trtllm",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=_MIN_CAPABILITY,
        max_compute_capability=_MAX_CAPABILITY,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        head_sizes=(64, 128),
        block_sizes=(16, 32, 64),
        features=frozenset({"graph_safe", "window"}),
    ),
    load="tokenspeed_kernels_blackwell.attention.trtllm:attention",
    requires=("flashinfer",),
    obtain=_OBTAIN_FLASHINFER,
    needs_compile=True,  # the first call compiles a launcher and downloads kernels
)

FA4 = KernelSpec(
    op="attention",
    backend="fa4",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=_MIN_CAPABILITY,
        max_compute_capability=_MAX_CAPABILITY,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        head_sizes=(64, 80, 96, 112, 128, 256),
        # Not 128: with its tile size the library reads the unwritten rest of a row's last block.
        block_sizes=(16, 32, 64),
        features=frozenset({"graph_safe", "window", "soft_cap", "sinks"}),
    ),
    load="tokenspeed_kernels_blackwell.attention.fa4:attention",
    requires=("flash_attn", "quack"),  # flash_attn alone could be FlashAttention-2
    obtain="pip install 'tokenspeed-kernels-blackwell[flash-attn-4]'",
    needs_compile=True,  # each kernel is compiled at the first call that needs it
)


def _blackwell(op: str, module: str, *limits: AxisLimit) -> KernelSpec:
    return KernelSpec(
        op=op,
        backend="blackwell",
        capability=Capability(
            platforms=("cuda",),
            min_compute_capability=_MIN_CAPABILITY,
            max_compute_capability=_MAX_CAPABILITY,
            dtypes=_HALVES,
            features=frozenset({"graph_safe"}),
            limits=limits,
        ),
        load=f"tokenspeed_kernels_blackwell.{module}:{op}",
        requires=("triton",),
    )


def _torch_reference(op: str, module: str, features: frozenset[str], *sizes: str) -> KernelSpec:
    return KernelSpec(
        op=op,
        backend="torch-blocks",
        capability=Capability(
            platforms=("cpu", "cuda"),
            dtypes=("float32", *_HALVES),
            features=features,
            limits=tuple(AxisLimit(size, 32, multiple_of=32) for size in sizes),
        ),
        load=f"tokenspeed_kernels_blackwell.{module}:{op}",
        reference=True,
    )


_GRAPHS = frozenset({"graph_safe"})
_IN_SIZE = AxisLimit("in_size", 128, multiple_of=128)
_GROUPS = AxisLimit("size", 32, multiple_of=32)
_EXPERTS = (
    AxisLimit("num_experts", 1, 1024),
    AxisLimit("hidden_size", 128, multiple_of=128),
    AxisLimit("intermediate_size", 128, multiple_of=128),
)

BLOCK_SCALED = (
    _blackwell("linear_mxfp8", "linear.block_scaled", _IN_SIZE),
    _blackwell("linear_nvfp4", "linear.block_scaled", _IN_SIZE),
    _blackwell("quantize_mxfp8", "linear.quantize", _GROUPS),
    _blackwell("quantize_nvfp4", "linear.quantize", _GROUPS),
)
TORCH_BLOCKS = (
    _torch_reference("quantize_mxfp8", "linear.reference", _GRAPHS, "size"),
    _torch_reference("linear_mxfp8", "linear.reference", _GRAPHS, "in_size"),
    _torch_reference("quantize_nvfp4", "linear.reference", _GRAPHS, "size"),
    _torch_reference("linear_nvfp4", "linear.reference", _GRAPHS, "in_size"),
)

MOE = tuple(
    _blackwell(op, "moe.experts", *_EXPERTS) for op in ("moe_experts_mxfp8", "moe_experts_nvfp4")
)
TORCH_MOE = tuple(
    _torch_reference(op, "moe.reference", frozenset(), "hidden_size", "intermediate_size")
    for op in ("moe_experts_mxfp8", "moe_experts_nvfp4")
)

_MLA_SIZES = (AxisLimit("latent_size", 512, 512), AxisLimit("rope_size", 64, 64))

MLA = KernelSpec(
    op="mla_decode",
    backend="blackwell",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=_MIN_CAPABILITY,
        max_compute_capability=_MAX_CAPABILITY,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        block_sizes=(64,),
        features=frozenset({"graph_safe"}),
        limits=_MLA_SIZES,
    ),
    load="tokenspeed_kernels_blackwell.mla.decode:mla_decode",
    requires=("triton",),
)
BLACKWELL_ATTENTION = (PREFILL, MLA)


def _flashinfer_mla(min_heads: int, max_heads: int) -> KernelSpec:
    return KernelSpec(
        op="mla_decode",
        backend="trtllm_mla",
        capability=Capability(
            platforms=("cuda",),
            min_compute_capability=_MIN_CAPABILITY,
            max_compute_capability=_MAX_CAPABILITY,
            dtypes=("bfloat16",),
            kv_dtypes=("bfloat16",),
            block_sizes=(32, 64),
            features=frozenset({"graph_safe"}),
            limits=(AxisLimit("num_heads", min_heads, max_heads), *_MLA_SIZES),
        ),
        load="tokenspeed_kernels_blackwell.mla.flashinfer:mla_decode",
        requires=("flashinfer",),
        obtain=_OBTAIN_FLASHINFER,
        needs_compile=True,  # like FLASHINFER
    )


# The library rejects 65 to 127 heads.
FLASHINFER_MLA = (_flashinfer_mla(1, 64), _flashinfer_mla(128, 128))

TOKENSPEED_MLA = KernelSpec(
    op="mla_decode",
    backend="tokenspeed_mla",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=_MIN_CAPABILITY,
        max_compute_capability=_MAX_CAPABILITY,
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        block_sizes=(32, 64),
        features=frozenset({"graph_safe"}),
        limits=(AxisLimit("num_heads", 1, 128), *_MLA_SIZES),
    ),
    load="tokenspeed_kernels_blackwell.mla.tokenspeed_mla:mla_decode",
    requires=("tokenspeed_mla",),
    obtain="pip install 'tokenspeed-kernels-blackwell[tokenspeed-mla]'",
    needs_compile=True,  # each kernel is compiled at the first call that needs it
)
