"""Machine code of the prefill kernel for compute capability 10.0 and 10.3."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from machine_code import REGISTERS, SHARED_BYTES, TENSOR_COLUMNS, compiled
from tokenspeed_kernels_blackwell import PREFILL
from tokenspeed_kernels_blackwell.attention.prefill import BLOCK_M, NUM_STAGES, NUM_WARPS
from tokenspeed_kernels_blackwell.attention.prefill_kernel import attend

STRIDES = ("q_stride_t", "q_stride_h", "out_stride_t", "out_stride_h")
HEAD_SIZES = PREFILL.capability.head_sizes
SMALLEST, *OTHERS, LARGEST = sorted(HEAD_SIZES)
# The largest size with a window needs the most registers and memory.
DEFAULT = [
    (103, SMALLEST, True),
    *((100, head_size, False) for head_size in OTHERS),
    (100, LARGEST, True),
]
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.release)
    for case in product((100, 103), HEAD_SIZES, (False, True))
]


@pytest.mark.parametrize(("capability", "head_size", "has_window"), CASES)
def test_prefill_kernel_fits_and_uses_tcgen05(
    capability: int, head_size: int, has_window: bool, tmp_path: Path
) -> None:
    (block_size,), dtype = PREFILL.capability.block_sizes, "fp16" if has_window else "bf16"
    box = f"tensordesc<{dtype}[1, 1, {block_size}, {head_size}]>"
    signature = {
        "q_ptr": f"*{dtype}",
        "k_desc": box,
        "v_desc": box,
        "out_ptr": f"*{dtype}",
        "query_start_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "table_ptr": "*i32",
        "num_rows": "i32",
        "window": "i32",
        "log2_scale": "fp32",
        **dict.fromkeys(STRIDES, "i32"),
        "table_stride": "i32",
    }
    code = compiled(
        attend,
        signature,
        {
            "G": 4,
            "D": head_size,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": BLOCK_M,
            "HAS_WINDOW": has_window,
        },
        tmp_path,
        capability=capability,
        aligned=("q_ptr", "out_ptr", *STRIDES),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES[head_size],
    )
    assert code.count("tcgen05.mma") > 0, "products on the tensor cores of this generation"
    assert code.count("cp.async.bulk.tensor") > 0, "keys and values are loaded with TMA"
    assert code.count("mma.sync") == 0, "and by no unit of an older one"
    assert code.stack_bytes == 0, "registers are spilled"
    assert code.num_registers * 32 * NUM_WARPS <= REGISTERS
    assert code.shared_bytes <= SHARED_BYTES
    assert code.tensor_columns <= TENSOR_COLUMNS
