"""Kernels for devices of compute capability 9.0: their descriptors. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import Capability, KernelSpec

__all__ = ["FA3"]

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
        # Blocks that are multiples of 128 (64 with a window and heads of 256) are copied whole by the library, with
        # what other requests left in a row's last block; a NaN there times a weight of zero is NaN.
        block_sizes=(16, 32),
        features=frozenset({"graph_safe", "window"}),
    ),
    load="tokenspeed_kernels_hopper.fa3:attention",
    requires=("flash_attn_interface",),
    obtain="pip install 'tokenspeed-kernels-hopper[fa3]'",
)
