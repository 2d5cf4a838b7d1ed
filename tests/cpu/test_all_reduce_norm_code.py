"""The PTX of the fused all-reduce for compute capability 9.0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernels.triton.comm import overlap
from tokenspeed_kernels.triton.comm.all_reduce_norm import (
    NUM_AHEAD,
    NUM_PROGRAMS,
    _all_reduce_add_rms_norm,
    tiling,
)


def compiled(size: int, alignment: int, num_scales: int = 0) -> Mapping[str, str]:
    """Return the kernel's code for compute capability 9.0, bfloat16 and two processes."""
    block, num_warps = tiling(size)
    constants: dict[str, Any] = {
        "RANK": 1,
        "NUM_PROCESSES": 2,
        "NUM_PROGRAMS": NUM_PROGRAMS,
        "NUM_AHEAD": NUM_AHEAD,
        "N": size,
        "BLOCK_N": block,
        "ALIGNMENT": alignment,
        "BITS": tl.int16,
        "NUM_SCALES": num_scales,
        "GROUP": 128,
        "SEND": True,
        "RECEIVE": True,
        "PDL": True,
    }
    if num_scales == 0:
        constants["scale_ptr"] = None
    kernel = _all_reduce_add_rms_norm
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature["eps"] = "fp32"
    for name in names:
        if name.endswith("_ptr") and name not in constants:
            signature[name] = "*i64" if name.startswith(("inboxes", "calls")) else "*bf16"
    signature["aborted_ptr"] = "*i32"
    if num_scales:
        signature["y_ptr"], signature["scale_ptr"] = "*fp8e4nv", "*fp32"
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    if size % 16 == 0:
        aligned += ["x_stride", "residual_stride", "inbox_size"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    options = {"num_warps": num_warps, "launch_pdl": True}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    stages: Mapping[str, str] = code.asm
    return stages


def ptx(size: int, alignment: int, num_scales: int = 0) -> str:
    return compiled(size, alignment, num_scales)["ptx"]


def layout_of_squares(size: int, num_scales: int) -> str:
    """Return the layout over threads of the values that are squared and added up."""
    code = compiled(size, 16, num_scales)["ttgir"]
    first = re.search(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) ->", code)
    assert first is not None
    layout = re.search(rf"^{first[1]} = (.*)$", code, re.MULTILINE)
    assert layout is not None
    return layout[1]


@pytest.mark.parametrize("num_scales", [0, 1, 32])
def test_rows_are_copied_16_bytes_at_a_time(num_scales: int) -> None:
    text = ptx(4096, 16, num_scales)
    assert "ld.volatile.global.v4.b32" in text
    assert "st.global.v4.b32" in text
    assert not re.search(r"(ld\.volatile|st)\.global\.b16", text)


@pytest.mark.parametrize("num_scales", [1, 32])
def test_quantized_values_are_stored_in_pairs_or_more(num_scales: int) -> None:
    text = ptx(4096, 16, num_scales)
    assert "cvt.rn.satfinite.e4m3x2.f32" in text
    assert not re.search(r"st\.global\.b8", text)
    assert "e4m3" not in ptx(4096, 16)


@pytest.mark.parametrize("size", [16, 144, 2048, 5120])
def test_quantization_does_not_change_the_order_of_sums(size: int) -> None:
    layouts = {layout_of_squares(size, num_scales) for num_scales in (0, 1, triton.cdiv(size, 128))}
    assert len(layouts) == 1


@pytest.mark.parametrize(
    ("size", "alignment", "num_scales"), [(4096, 16, 0), (201, 2, 0), (4096, 16, 1), (4096, 16, 32)]
)
def test_rows_are_sent_before_any_is_received(size: int, alignment: int, num_scales: int) -> None:
    lines = ptx(size, alignment, num_scales).splitlines()
    order = [
        name
        for line in lines
        for name, pattern in (
            ("wait", r"griddepcontrol\.wait"),
            ("send", r"\bst\.global"),
            ("receive", r"ld\.volatile\.global"),
        )
        if re.search(pattern, line)
    ]
    assert order.count("wait") == 1
    assert order.index("wait") < order.index("send") < order.index("receive")


@pytest.mark.parametrize(("size", "alignment"), [(16, 16), (48, 16), (201, 2), (4096, 16)])
def test_all_threads_agree_that_a_row_has_arrived(size: int, alignment: int) -> None:
    lines = ptx(size, alignment).splitlines()
    reads = [at for at, line in enumerate(lines) if "ld.volatile.global" in line]
    polls = ["\n".join(lines[first:second]) for first, second in pairwise(reads)]
    assert any("bar.sync" in between for between in polls)
    block, num_warps = tiling(size)
    assert block >= 32 * num_warps


@pytest.mark.parametrize("num_scales", [0, 1, 40])
def test_overlapped_kernels_compile(num_scales: int) -> None:
    block, num_warps = tiling(5120)
    constants = {
        "N": 5120,
        "BLOCK_N": block,
        "VECTOR": 8,
        "NUM_SCALES": num_scales,
        "GROUP": 128,
        "NUM_PARTS": 2,
    }
    types = {"eps": "fp32", "residual_stride": "i32", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("arrived_ptr", "aborted_ptr", "calls_ptr"), "*i32")
    types |= dict.fromkeys(("flags_ptr", "other_flags_ptr"), "*i32")
    if num_scales:
        types["y_ptr"] = "*fp8e4nv"
    for kernel in (overlap._meet, overlap._receive):
        names = kernel.arg_names
        own = {name: value for name, value in constants.items() if name in names}
        if num_scales == 0 and "scale_ptr" in names:
            own["scale_ptr"] = None
        signature = {
            name: "constexpr" if name in own else types.get(name, "*bf16") for name in names
        }
        constexprs = {(names.index(name),): value for name, value in own.items()}
        source = ASTSource(kernel, signature, constexprs, {})
        code = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
        )
        assert "sys.acquire" in code.asm["ptx"]
        assert "ld.volatile" in code.asm["ptx"]


@pytest.mark.parametrize(("num_bytes", "share"), [(8192, 0.69), (25600, 0.89)])
@pytest.mark.parametrize("size", [4096, 5120])
def test_two_parts_take_as_few_waves_of_tiles_as_possible(
    size: int, num_bytes: int, share: float
) -> None:
    for num_rows in range(6144, 16384, 97):
        middle = overlap.first_part(num_rows, size, num_bytes, 132)
        assert middle % overlap.TILE_ROWS == 0
        waves = {}
        for first in range(128, num_rows, 128):
            tiles = (ceil(rows / 128) * size // 256 for rows in (first, num_rows - first))
            waves[first] = sum(ceil(each / 132) for each in tiles)
        fewest = min(waves.values())
        assert waves[middle] == fewest
        others = [first for first, each in waves.items() if each == fewest and first < middle]
        assert middle <= share * num_rows or not others


def test_first_part_grows_with_the_time_of_the_computation() -> None:
    first_parts = [overlap.first_part(8192, 5120, each, 132) for each in (2048, 8192, 25600)]
    assert first_parts == [19 * 128, 39 * 128, 52 * 128]
