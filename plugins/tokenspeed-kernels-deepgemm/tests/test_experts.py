"""DeepGEMM's experts over a mock of the library that takes only calls of its recorded signatures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_kernels_deepgemm import EXPERTS, experts
from tokenspeed_kernels_deepgemm.experts import ROWS_PER_TILE, compile_grouped, place
from tokenspeed_testing.conformance import check
from tokenspeed_testing.signatures import kept, restricted_to
from torch import Tensor

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog
from tokenspeed_kernels.reference import fp8_block

SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
NAME = "m_grouped_fp8_gemm_nt_contiguous"
PROBLEM = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "dtype": "bfloat16",
}


def multiply(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    grouped_layout: Tensor,
    **given: Any,
) -> None:
    """Compute the library's result for these arguments; rows without an expert hold anything."""
    assert given == {"disable_ue8m0_cast": True}
    (x, x_scale), (weight, weight_scale) = a, b
    tensors = (x, x_scale, weight, weight_scale, d, grouped_layout)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert grouped_layout.dtype == torch.int32
    assert len(grouped_layout) == len(x) == len(d)
    assert len(x) % ROWS_PER_TILE == 0
    d.fill_(float("nan"))
    linear = fp8_block.linear_fp8_block({"dtype": "bfloat16"})
    for tile in range(0, len(x), ROWS_PER_TILE):
        rows = slice(tile, tile + ROWS_PER_TILE)
        owners = grouped_layout[rows]
        (num_used,) = (owners >= 0).sum().view(1).tolist()
        assert (owners[:num_used] == owners[0]).all(), (
            "a tile has one expert, and its rows come first"
        )
        if num_used:
            used, expert = slice(tile, tile + num_used), int(owners[0])
            d[used] = linear(x[used], x_scale[used], weight[expert], weight_scale[expert], None)


@pytest.mark.skipif(
    importlib.util.find_spec("deep_gemm") is not None,
    reason="the library itself is installed, and it computes nothing on a CPU",
)
def test_experts_conform_over_a_mock_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("deep_gemm")
    library.__dict__[NAME] = restricted_to(
        multiply, *(each[f"deep_gemm/__init__.py:{NAME}"] for each in SIGNATURES.values())
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # skip compilation
    for name in ("quantize_fp8_groups", "silu_mul_fp8_groups"):
        monkeypatch.setattr(experts, name, getattr(fp8_block, name))
    assert check(EXPERTS, torch.device("cpu")) >= 8


def test_tiles_have_the_rows_of_one_expert() -> None:
    ids = torch.tensor([[3, 0]] * 130 + [[3, 5]] * 2, dtype=torch.int32)
    rows, owners = place(ids, 6)
    assert owners.shape == ((264 // 128 + 6) * 128,)
    assert torch.equal(owners[rows], ids.flatten())
    assert rows.unique().numel() == 264
    tiles = owners.view(-1, ROWS_PER_TILE)
    assert [int(tile[0]) for tile in tiles] == [0, 0, 3, 3, 5, -1, -1, -1]
    assert [int((tile >= 0).sum()) for tile in tiles] == [128, 2, 128, 4, 2, 0, 0, 0]


def test_every_number_of_tiles_is_compiled() -> None:
    asked = []

    def grouped(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, owners: Tensor
    ) -> None:
        asked.append((len(a[0]), len(d), len(owners), tuple(b[1].shape)))

    compile_grouped(grouped, 4, 256, 512, max_tiles=3, device="meta")
    assert asked == [(rows, rows, rows, (4, 4, 2)) for rows in (128, 256, 384)]


def test_they_are_selected_by_name_only() -> None:
    catalog = Catalog.discover()
    for names, taken in (((), "triton"), (("deepgemm",), "deepgemm")):
        chosen = Selector(
            installed_kernels(catalog),
            PlatformInfo("cuda", (9, 0)),
            [Override.parse("moe", names)] if names else [],
            ops=installed_ops(catalog),
            needs=frozenset({"graph_safe"}),
            module_exists=lambda name: True,
        )
        assert chosen.select("moe_experts_fp8_block", PROBLEM).spec.backend == taken
