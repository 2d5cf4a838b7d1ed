"""Descriptors of FlashInfer's paged attention and experts. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec
from tokenspeed_kernels_flashinfer.compiled import Module, compiled_modules

__all__ = ["ATTENTION", "EXPERTS", "attention_specs"]

_HALVES = ("bfloat16", "float16")
_HEAD_SIZES = (64, 128, 256)
_OBTAIN = "pip install 'tokenspeed-kernels-flashinfer[flashinfer]'"


def _spec(capability: Capability, *, needs_compile: bool) -> KernelSpec:
    return KernelSpec(
        op="attention",
        backend="flashinfer",
        capability=capability,
        load="tokenspeed_kernels_flashinfer.attention:attention",
        requires=("flashinfer",),
        obtain=_OBTAIN,
        needs_compile=needs_compile,
        options="tokenspeed_kernels_flashinfer.options:FlashInferOptions",
    )


def attention_specs(compiled: Iterable[Module]) -> tuple[KernelSpec, ...]:
    """Return a spec for each compiled module and phase, then one for everything that needs compilation.

    The library compiles one module per dtype, cache dtype, head size, and attention with or without a window.
    """
    ready = (
        _spec(
            Capability(
                platforms=("cuda",),
                min_compute_capability=module.compute_capability,
                max_compute_capability=module.compute_capability,
                dtypes=(module.dtype,),
                kv_dtypes=(module.kv_dtype,),
                head_sizes=(module.head_size,),
                block_sizes=_BLOCK_SIZES,
                phases=(phase,),
                features=frozenset(
                    {"graph_safe", "window"} if module.has_window else {"graph_safe"}
                ),
            ),
            needs_compile=False,
        )
        for module in compiled
        if module.head_size in _HEAD_SIZES
        for phase in module.phases
    )
    return (*ready, _spec(_ANY, needs_compile=True))


_BLOCK_SIZES = (16, 32, 64, 128)
_ANY = Capability(
    platforms=("cuda",),
    min_compute_capability=(8, 0),
    dtypes=_HALVES,
    kv_dtypes=(*_HALVES, "float8_e4m3fn"),
    head_sizes=_HEAD_SIZES,
    block_sizes=_BLOCK_SIZES,
    features=frozenset({"graph_safe", "window", "soft_cap"}),
)

ATTENTION = attention_specs(compiled_modules())

EXPERTS = KernelSpec(
    op="moe_experts",
    backend="flashinfer",
    capability=Capability(
        # The library also compiles these kernels for 8.9, but without Hopper's instructions.
        platforms=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(12, 1),
        dtypes=_HALVES,
        features=frozenset({"graph_safe"}),
        limits=(
            AxisLimit("hidden_size", 8, multiple_of=8),  # 16 bytes, for TMA loads
            AxisLimit("intermediate_size", 8, multiple_of=8),
        ),
    ),
    load="tokenspeed_kernels_flashinfer.experts:moe_experts",
    requires=("flashinfer",),
    obtain=_OBTAIN,
    needs_compile=True,  # one module with the kernels of all dtypes, which takes many minutes
)
