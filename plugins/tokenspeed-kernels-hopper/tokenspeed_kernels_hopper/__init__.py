"""Descriptors of the Hopper kernels (compute capability 9.0). Imports no tensor library."""

from __future__ import annotations

from dataclasses import replace

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec

__all__ = [
    "ATTENTION",
    "FA3",
    "FA3_SCORES",
    "FLASHMLA",
]

_HALVES = ("bfloat16", "float16")

FA3 = KernelSpec(
    op="attention",
    backend="fa3",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        dtypes=_HALVES,
        kv_dtypes=_HALVES,
        head_sizes=(64, 80, 96, 112, 128, 192, 256),
        # The library loads blocks whole if their size is a multiple of 128 (64 with a window and head size 256). Stale
        # values in a row's last block may then be NaN, and NaN times a weight of zero is NaN.
        block_sizes=(16, 32),
        features=frozenset({"graph_safe", "window"}),
    ),
    load="tokenspeed_kernels_hopper.load_fa3:attention",
    requires=("flash_attn_interface",),
    obtain="pip install 'tokenspeed-kernels-hopper[fa3]'",
)
FA3_SCORES = replace(
    FA3,
    capability=replace(
        FA3.capability,
        dtypes=("bfloat16",),  # the dtype of the library's sinks
        kv_dtypes=("bfloat16",),
        features=FA3.capability.features | {"chunked", "sinks"},
    ),
    needs_name=True,
)
ATTENTION = (FA3, FA3_SCORES)

FLASHMLA = KernelSpec(
    op="mla_decode",
    backend="flashmla",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        block_sizes=(64,),
        features=frozenset({"graph_safe"}),
        limits=(
            AxisLimit("latent_size", 512, 512),
            AxisLimit("rope_size", 64, 64),
        ),
    ),
    load="tokenspeed_kernels_hopper.flashmla:FlashMlaDecode",
    note=(
        "steps of few rows run the kernel triton from tokenspeed-kernels: fewer than 16 rows with up to 31 heads, 1 row "
        "with up to 127"
    ),
    requires=("flash_mla",),
    obtain="pip install 'tokenspeed-kernels-hopper[flashmla]'",
)
