"""The PTX of the fused all-reduce, which no machine with several GPUs has run."""

from __future__ import annotations

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernels.triton.comm.all_reduce_norm import NUM_PROGRAMS, _all_reduce_add_rms_norm


def ptx(size: int, alignment: int) -> str:
    """Return the kernel's PTX for compute capability 9.0, bfloat16 and two processes."""
    constants = {
        "RANK": 1,
        "NUM_PROCESSES": 2,
        "NUM_PROGRAMS": NUM_PROGRAMS,
        "N": size,
        "BLOCK_N": triton.next_power_of_2(size),
        "ALIGNMENT": alignment,
        "PUBLISH": True,
        "REDUCE": True,
    }
    kernel = _all_reduce_add_rms_norm
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature["eps"] = "fp32"
    for name in names:
        if name.endswith("_ptr"):
            signature[name] = (
                "*i64" if name.startswith(("buffers", "signals", "calls")) else "*bf16"
            )
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    if size % 16 == 0:
        aligned += ["x_stride", "residual_stride", "buffer_size"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    text: str = code.asm["ptx"]
    return text


def test_rows_of_other_processes_are_read_in_16_bytes() -> None:
    text = ptx(4096, 16)
    assert "ld.volatile.global.v4.b32" in text
    assert not re.search(r"(ld\.volatile|st)\.global\.b16", text)


@pytest.mark.parametrize(("size", "alignment"), [(4096, 16), (201, 2)])
def test_signals_order_memory_between_gpus(size: int, alignment: int) -> None:
    lines = ptx(size, alignment).splitlines()
    order = [
        name
        for line in lines
        for name, pattern in (
            ("barrier", r"\bbar\.sync"),
            ("release", r"\.sys\.release\.exch\.b64|\.release\.sys\S*exch\.b64"),
            ("acquire", r"\.sys\.acquire|\.acquire\.sys"),
            ("read", r"ld\.volatile\.global"),
        )
        if re.search(pattern, line)
    ]
    assert order.count("release") == 2
    assert order.count("acquire") == 2
    first_release, last_acquire = (
        order.index("release"),
        len(order) - 1 - order[::-1].index("acquire"),
    )
    assert order[first_release - 1] == "barrier"
    assert order[last_acquire + 1] == "barrier"
    assert min(index for index, name in enumerate(order) if name == "read") > last_acquire
