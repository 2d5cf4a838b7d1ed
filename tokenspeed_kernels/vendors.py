"""The vendor kernel plugins that TokenSpeed maintains: `auto` may choose their kernels before they are ranked."""

from __future__ import annotations

from tokenspeed_core.api import AutoDistribution

VENDORS = tuple(
    AutoDistribution(f"tokenspeed-kernels-{vendor}")
    for vendor in ("blackwell", "deepgemm", "flashinfer", "hopper")
)
