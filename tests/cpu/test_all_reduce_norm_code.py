"""The PTX of the fused all-reduce for compute capability 9.0."""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernels.triton.comm.all_reduce_norm import (
    NUM_AHEAD,
    NUM_PROGRAMS,
    _all_reduce_add_rms_norm,
)


def ptx(size: int, alignment: int, *, pdl: bool = True) -> str:
    """Return the kernel's PTX for compute capability 9.0, bfloat16 and two processes."""
    constants = {
        "RANK": 1,
        "NUM_PROCESSES": 2,
        "NUM_PROGRAMS": NUM_PROGRAMS,
        "NUM_AHEAD": NUM_AHEAD,
        "N": size,
        "BLOCK_N": triton.next_power_of_2(size),
        "ALIGNMENT": alignment,
        "BITS": tl.int16,
        "SEND": True,
        "RECEIVE": True,
        "PDL": pdl,
    }
    kernel = _all_reduce_add_rms_norm
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature["eps"] = "fp32"
    for name in names:
        if name.endswith("_ptr"):
            signature[name] = "*i64" if name.startswith(("inboxes", "calls")) else "*bf16"
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
    options = {"num_warps": 8, "launch_pdl": pdl}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text: str = code.asm["ptx"]
    return text


def test_rows_travel_in_16_bytes() -> None:
    text = ptx(4096, 16)
    assert "ld.volatile.global.v4.b32" in text
    assert "st.global.v4.b32" in text
    assert not re.search(r"(ld\.volatile|st)\.global\.b16", text)


@pytest.mark.parametrize(("size", "alignment"), [(4096, 16), (201, 2)])
def test_rows_are_sent_before_any_is_received(size: int, alignment: int) -> None:
    lines = ptx(size, alignment).splitlines()
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
