"""How many leading blocks all rows of a step share, found on the device.

Rows then attend to these together and to the rest each by itself, and the two are merged: cascade attention (Ye et
al. 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 9  # that must share: fewer find the keys in the device's cache
MIN_KEYS = 256  # that must be shared
_FAR = 2**30


def shared_blocks(seq_lens: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Return int32 [2]: the blocks that all rows of a length above 0 lead with, and the first such row.

    seq_lens int32 [S], block_table int32 [S, max_num_blocks]. Each row keeps one key at least to itself. Where rows or
    keys are too few to gain, the number is 0. Does not wait for the device.
    """
    is_real = seq_lens > 0
    lead = is_real.to(torch.int32).argmax()
    agrees = (
        (block_table == block_table.index_select(0, lead.view(1))) | ~is_real.unsqueeze(1)
    ).all(0)
    num_agreed = agrees.to(torch.int32).cumprod(0).sum()
    fewest = torch.where(is_real, seq_lens - 1, _FAR).amin() // block_size
    shared = torch.minimum(num_agreed, fewest)
    gains = (is_real.sum() >= MIN_ROWS) & (shared * block_size >= MIN_KEYS)
    return torch.stack((torch.where(gains, shared, 0), lead)).to(torch.int32)
