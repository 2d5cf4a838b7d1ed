"""Descriptor of DeepEP's all-to-all of tokens. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec

__all__ = ["DEEPEP"]

DEEPEP = KernelSpec(
    op="exchange_tokens",
    backend="deepep",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=(8, 0),
        dtypes=("bfloat16",),
        features=frozenset(),
        # The library has settings for 2, 4 and 8 processes of one node.
        limits=(
            AxisLimit("num_processes", 2, 8, multiple_of=2),
            AxisLimit("size", 128, multiple_of=128),
        ),
    ),
    load="tokenspeed_comm_deepep.exchange:exchange_tokens",
    options="tokenspeed_comm_deepep.options:DeepEPOptions",
    requires=("deep_ep",),
    obtain="pip install 'tokenspeed-comm-deepep[deepep]'",
    needs_name=True,
)
