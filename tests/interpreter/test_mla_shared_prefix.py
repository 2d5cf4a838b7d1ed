"""Latent attention to a shared prefix under Triton's interpreter: the search, and decodes that read the prefix once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import poisoned_memory
from torch import Tensor

from tokenspeed_kernels.options import SharedPrefixOptions
from tokenspeed_kernels.reference.mla import mla_decode
from tokenspeed_kernels.triton.attention import shared_prefix
from tokenspeed_kernels.triton.attention.shared_prefix import find_shared_prefix
from tokenspeed_kernels.triton.mla import absorbed
from tokenspeed_kernels.triton.mla.absorbed import AbsorbedAttention, Tiling

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about log2(0).
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

LATENT, ROPE, SCALE = 24, 8, 0.3
TILING, SHARED_TILING = Tiling(16, 16, 4, 1), Tiling(32, 16, 8, 1)


class Rows:
    """Rows of these lengths with a common prefix, whose blocks are in the table of the first row with a length.

    Rows in `others` do not have it.
    """

    def __init__(
        self,
        num_heads: int,
        block_size: int,
        lengths: list[int],
        num_shared: int,
        others: tuple[int, ...] = (),
    ) -> None:
        seed = torch.Generator().manual_seed(num_heads + sum(lengths))
        self.problem: dict[str, Any] = {
            "phase": "decode",
            "num_heads": num_heads,
            "latent_size": LATENT,
            "rope_size": ROPE,
            "block_size": block_size,
            "dtype": "float32",
            "kv_dtype": "float32",
        }
        self.max_len = max(lengths)
        width, num_common = -(-self.max_len // block_size), num_shared // block_size
        num_blocks = len(lengths) * width
        self.table = torch.randperm(num_blocks, generator=seed).to(torch.int32).view(-1, width)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.lead = next(row for row, length in enumerate(lengths) if length)
        is_sharing = self.lengths > 0
        is_sharing[list(others)] = False
        self.table[is_sharing, :num_common] = self.table[self.lead, :num_common]
        self.table[self.lengths == 0] = -1
        each = (num_shared * is_sharing).tolist()
        self.shared = torch.tensor([num_shared, self.lead, *each], dtype=torch.int32)
        shape = (num_blocks, block_size, LATENT + ROPE)
        self.cache = torch.randn(shape, generator=seed)
        self.q = torch.randn((len(lengths), num_heads, LATENT + ROPE), generator=seed)

    def decode(self, kernel: Any, table: Tensor, *shared: Tensor) -> Tensor:
        arguments = (self.q, self.cache, table, self.lengths, self.max_len, SCALE)
        with poisoned_memory():
            y: Tensor = kernel(*arguments, *shared)
        return y

    def check(self, num_shared_splits: int = 2) -> None:
        """Compare with the reference. The shared entries are in the table of one row only."""
        expected = self.decode(mla_decode(self.problem), self.table)
        table = self.table.clone()
        num_common = int(self.shared[0]) // self.problem["block_size"]
        is_sharing = self.shared[2:] > 0
        is_sharing[self.lead] = False
        table[is_sharing, :num_common] = 2**30
        attention = AbsorbedAttention(self.problem, TILING, SHARED_TILING, num_shared_splits)
        found = self.decode(attention.decode, table, self.shared)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "block_size", "lengths", "num_shared", "others"),
    [
        pytest.param(5, 8, [41, 50, 73, 44], 40, (), id="shared"),
        pytest.param(5, 8, [41, 50, 30, 73, 9], 40, (2, 4), id="rows outside the group"),
        pytest.param(7, 8, [0, 41, 0, 90, 0], 40, (), id="padding rows"),
        pytest.param(16, 16, [49, 81], 48, (), id="a tile of two rows"),
        pytest.param(2, 64, [129, 200], 128, (), id="a row with one own token"),
        pytest.param(40, 8, [30, 20], 16, (), id="several tiles per row"),
        pytest.param(128, 8, [30, 20], 16, (), id="128 heads", marks=pytest.mark.release),
        pytest.param(3, 24, [49, 100], 48, (), id="odd block size"),
        pytest.param(5, 8, [9, 30], 8, (), id="empty shared split"),
        pytest.param(16, 8, [0, 0, 41], 40, (), id="a tile of padding rows"),
    ],
)
def test_shared_entries_are_read_from_one_row(
    num_heads: int, block_size: int, lengths: list[int], num_shared: int, others: tuple[int, ...]
) -> None:
    Rows(num_heads, block_size, lengths, num_shared, others).check()


@pytest.mark.parametrize("num_shared_splits", [1, 3, 9])
def test_shared_parts_are_merged_with_split_rows(
    num_shared_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "SHORT_SHARE", 16)
    Rows(4, 8, [200, 73, 100], 72).check(num_shared_splits)


def test_nothing_is_read_if_nothing_is_shared() -> None:
    rows = Rows(5, 8, [41, 0, 73], 0)
    rows.shared[1] = 2**30  # not an index
    rows.check()


def test_fp8_entries_are_shared() -> None:
    rows = Rows(5, 8, [41, 50, 73], 40)
    rows.problem |= {"dtype": "float16", "kv_dtype": "float8_e4m3fn"}
    rows.cache, rows.q = rows.cache.to(torch.float8_e4m3fn), rows.q.to(torch.float16)
    expected = rows.decode(mla_decode(rows.problem), rows.table)
    attention = AbsorbedAttention(rows.problem, TILING, SHARED_TILING)
    found = rows.decode(attention.decode, rows.table, rows.shared)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_decode_shares_what_the_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [0, 273, 264, *(280 + row for row in range(8))]
    rows = Rows(2, 8, lengths, 272)
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_READS", 10 * 256)
    found = find_shared_prefix(rows.problem, SharedPrefixOptions())(rows.table, rows.lengths)
    assert found is not None
    # The third row's last token is the last of a shared block, which is therefore its own.
    assert found.tolist() == [256, 1, 0, *[256] * 10]
    rows.shared = found
    rows.check()


@pytest.mark.parametrize(("min_reads", "expected"), [(9 * 272, 272), (9 * 272 + 1, 0)])
def test_few_shared_entries_are_not_worth_it(
    min_reads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(2, 8, [*(273 + row for row in range(9)), 0, 0], 272)
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_READS", min_reads)
    found = find_shared_prefix(rows.problem, SharedPrefixOptions())(rows.table, rows.lengths)
    assert found is not None and found.tolist() == [expected, 0, *[expected] * 9, 0, 0]


def test_search_is_skipped_if_the_table_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(2, 8, [280] * 10, 272)
    for min_reads, is_skipped in ((10 * 280, False), (10 * 280 + 1, True)):
        monkeypatch.setattr(shared_prefix, "MIN_SHARED_READS", min_reads)
        found = find_shared_prefix(rows.problem, SharedPrefixOptions())(rows.table, rows.lengths)
        assert (found is None) == is_skipped


def test_search_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_READS", 1)
    rows = Rows(2, 8, [273 + row for row in range(10)], 272)
    off = SharedPrefixOptions(shared_prefix=False)
    assert find_shared_prefix(rows.problem, off)(rows.table, rows.lengths) is None


def test_search_needs_nine_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_READS", 1)
    rows = Rows(2, 8, [273 + row for row in range(8)], 272)
    assert find_shared_prefix(rows.problem, SharedPrefixOptions())(rows.table, rows.lengths) is None
