"""Kernels for devices of compute capability 10.0 to 10.3: their descriptors. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import Capability, KernelSpec

__all__ = ["FLASHINFER", "PROMPTS"]

_HALVES = ("bfloat16", "float16")
_OLDEST, _NEWEST = (10, 0), (10, 3)

PROMPTS = KernelSpec(
    op="attention",
    backend="blackwell",
    capability=Capability(
        platforms=("cuda",), min_compute_capability=_OLDEST, max_compute_capability=_NEWEST,
        dtypes=_HALVES, kv_dtypes=_HALVES, head_sizes=(64, 128, 256),
        block_sizes=(64,),  # what one load brings
        phases=("prefill",), features=frozenset({"graph_safe", "window"}),
    ),
    load="tokenspeed_kernels_blackwell.prompts:attention",
    requires=("triton",),
)

FLASHINFER = KernelSpec(
    op="attention",
    backend="flashinfer",
    capability=Capability(
        platforms=("cuda",), min_compute_capability=_OLDEST, max_compute_capability=_NEWEST,
        dtypes=_HALVES, kv_dtypes=_HALVES, head_sizes=(64, 128), block_sizes=(16, 32, 64),
        features=frozenset({"graph_safe", "window"}),
    ),
    load="tokenspeed_kernels_blackwell.flashinfer:attention",
    requires=("flashinfer",),
    obtain="pip install 'tokenspeed-kernels-blackwell[flashinfer]'",
    needs_compile=True,  # the library compiles its launcher, and downloads kernels, at the first call
)
