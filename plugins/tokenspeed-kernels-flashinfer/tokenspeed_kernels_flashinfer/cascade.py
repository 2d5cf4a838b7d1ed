"""Count the leading blocks that all rows of a step share, on the device.

In cascade attention (Ye et al., 2024), rows attend to shared keys together and to the rest separately, and both
results are merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 9  # minimum rows for cascade attention: with fewer, the L2 cache already holds the keys
MIN_KEYS = 256  # shared keys needed
_FAR = 2**30


def shared_blocks(seq_lens: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Return int32 [2]: the number of leading blocks that all non-empty rows share, and the first such row.

    seq_lens int32 [S], block_table int32 [S, max_num_blocks]. At least one key of each row stays unshared. The number
    is 0 if there are too few rows or keys for a gain. Does not synchronize with the device.
    """
    is_real = seq_lens > 0
    lead = is_real.to(torch.int32).argmax()
    agrees = (
        (block_table == block_table.index_select(0, lead.view(1))) | ~is_real.unsqueeze(1)
    ).all(0)
    num_agreed = agrees.to(torch.int32).cumprod(0).sum()
    max_shared = torch.where(is_real, seq_lens - 1, _FAR).amin() // block_size
    shared = torch.minimum(num_agreed, max_shared)
    pays = (is_real.sum() >= MIN_ROWS) & (shared * block_size >= MIN_KEYS)
    return torch.stack((torch.where(pays, shared, 0), lead)).to(torch.int32)
