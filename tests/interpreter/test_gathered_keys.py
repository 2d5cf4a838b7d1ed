"""The kernel that gathers keys for FlashAttention-3, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_kernels_hopper.gather import PADDING, Gathered

from tokenspeed_core.api import AttentionStep

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(2, 64), (3, 80)])
def test_gathered_rows_are_contiguous_and_zero_padded(num_kv_heads: int, head_size: int) -> None:
    lengths, generator = (37, 16, 0, 5), torch.Generator().manual_seed(0)
    table = torch.tensor([[4, 0, 6], [2, -1, -1], [-1, -1, -1], [5, -1, -1]], dtype=torch.int32)
    cache = torch.full((8, 3, 2, 16, num_kv_heads, head_size), float("nan"), dtype=torch.float16)
    for length, blocks in zip(lengths, table.tolist(), strict=True):
        for first in range(0, length, 16):
            filled = cache[blocks[first // 16], 1, :, : min(16, length - first)]
            filled.copy_(torch.randn(filled.shape, generator=generator))
    nothing = torch.zeros(0, dtype=torch.int32)
    step = AttentionStep(
        4, 0, 0, 37, nothing, torch.tensor(lengths, dtype=torch.int32), table, None, lengths
    )
    gathered = Gathered(
        sum(lengths) + 4 * PADDING, 6, num_kv_heads, head_size, torch.float16, torch.device("cpu")
    )
    gathered.keys.fill_(float("nan"))
    gathered.values.fill_(float("nan"))
    assert gathered.has_room(step)
    gathered.place(step)
    gathered.fill(step, cache[:, 1, 0], cache[:, 1, 1])
    starts = gathered.starts.tolist()
    assert starts == [0, 37 + PADDING, 53 + 2 * PADDING, 53 + 3 * PADDING, 58 + 4 * PADDING]
    for start, length, blocks in zip(starts, lengths, table, strict=False):
        at = torch.arange(length)
        for kind, found in enumerate((gathered.keys, gathered.values)):
            wanted = cache[blocks[at // 16].long(), 1, kind, at % 16]
            assert torch.equal(found[start : start + length], wanted)
            assert not found[start + length : start + length + PADDING].any()
