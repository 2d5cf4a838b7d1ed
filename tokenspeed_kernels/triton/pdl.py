"""Programmatic dependent launch: a kernel may start before the one ahead of it on the stream has ended.

A kernel launched so (`launch_pdl`) calls `gdc_launch_dependents`, which lets the next one start as soon as all its own
programs run, and `gdc_wait`, which returns when the kernel ahead has ended and its writes are seen. Before the wait
it reads only what no kernel writes; and each of its programs waits, so that the kernel behind it need look no
further back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def supports_pdl() -> bool:
    """Say whether the device can; it is asked once, when a kernel is bound."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def fetch(line):
    """Have the second-level cache fetch the lines of 128 bytes at pointers [...]: nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [line.to(tl.uint64, bitcast=True)],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )
