"""Descriptors of DeepGEMM's block-wise FP8 GEMMs. Imports no tensor library."""

from __future__ import annotations

from dataclasses import replace

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec

__all__ = ["DEEPGEMM", "EXPERTS"]

DEEPGEMM = KernelSpec(
    op="linear_fp8_block",
    backend="deepgemm",
    capability=Capability(
        # From 10.0 on the library rounds scales to powers of two, which the op does not allow.
        platforms=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        dtypes=("bfloat16",),
        features=frozenset({"graph_safe"}),
        limits=(
            AxisLimit("in_size", 128, multiple_of=128),
            AxisLimit("out_size", 128, multiple_of=128),
        ),
    ),
    load="tokenspeed_kernels_deepgemm.linear:linear_fp8_block",
    requires=("deep_gemm",),
    obtain="pip install 'tokenspeed-kernels-deepgemm[deepgemm]'",
    needs_compile=True,  # compiles kernels for each weight shape when the op is bound
)
EXPERTS = replace(
    DEEPGEMM,
    op="moe_experts_fp8_block",
    capability=replace(
        DEEPGEMM.capability,
        limits=(
            AxisLimit("hidden_size", 128, multiple_of=128),
            AxisLimit("intermediate_size", 128, multiple_of=128),
        ),
    ),
    load="tokenspeed_kernels_deepgemm.experts:moe_experts_fp8_block",
)
