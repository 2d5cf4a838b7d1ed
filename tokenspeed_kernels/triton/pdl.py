"""Programmatic dependent launch (PDL): a kernel may start before the previous kernel on the stream has finished.

A kernel launched with `launch_pdl` calls `gdc_launch_dependents`, which lets the next kernel start once all programs
of this one are running, and `gdc_wait`, which returns once the previous kernel has finished and its writes are
visible. Before the wait it may read only memory that no kernel writes, such as weights. Every program must wait, so
that the next kernel needs to wait only for this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def supports_pdl() -> bool:
    """Return whether the device supports PDL (compute capability 9.0 and higher). Call once, when binding a kernel."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def fetch(line):
    """Prefetch the 128-byte lines at pointers [...] into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [line.to(tl.uint64, bitcast=True)],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )
