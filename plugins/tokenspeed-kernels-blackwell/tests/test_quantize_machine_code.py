"""Machine code of the quantization kernels for compute capability 10.0 and 10.3, and selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from machine_code import compiled
from tokenspeed_kernels_blackwell.linear.quantize import BLOCK
from tokenspeed_kernels_blackwell.linear.quantize_kernel import to_mxfp8, to_nvfp4

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

FORMS = [
    (to_mxfp8, {"codes_ptr": "*fp8e4nv", "scale_ptr": "*u8"}),
    (to_nvfp4, {"codes_ptr": "*u8", "scale_ptr": "*fp8e4nv", "over_all_ptr": "*fp32"}),
]


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("kernel", "results"), FORMS, ids=["mxfp8", "nvfp4"])
def test_quantize_kernels_use_exact_instructions(
    kernel: Any, results: dict[str, str], dtype: str, capability: int, tmp_path: Path
) -> None:
    types = {"x_ptr": f"*{dtype}", **results, "x_stride": "i32"}
    code = compiled(
        kernel,
        types,
        {"GROUPS": 128, "BLOCK": BLOCK},
        tmp_path,
        capability=capability,
        aligned=tuple(types),
        num_warps=4,
        num_stages=3,
    )
    assert code.count("cvt.rn.satfinite.e4m3x2.f32") > 0, "rounds to nearest and saturates"
    assert code.count("div.full") == code.count("div.approx") == 0, "an inexact division"
    assert (code.count("div.rn.f32") > 0) == (kernel is to_nvfp4)
    assert code.stack_bytes == 0, "registers are spilled"


@pytest.mark.parametrize("op", ["quantize_mxfp8", "quantize_nvfp4"])
def test_quantize_kernel_is_selected_on_blackwell_only(
    op: str,
) -> None:
    catalog = Catalog.discover()
    for capability, backend in (((10, 3), "blackwell"), ((9, 0), "torch-blocks")):
        chosen = Selector(
            installed_kernels(catalog),
            PlatformInfo("cuda", capability),
            ops=installed_ops(catalog),
            needs=frozenset({"graph_safe"}),
        )
        assert chosen.select(op, {"size": 4096, "dtype": "bfloat16"}).spec.backend == backend
