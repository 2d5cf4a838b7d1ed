"""The built-in cache groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_core.api.cache_groups import FullAttention, SlidingWindow


@given(st.integers(1, 50), st.integers(0, 200))
def test_window_reads_its_own_token_and_those_before(window: int, position: int) -> None:
    read = [key for key in range(position + 1) if position - key < window]
    assert SlidingWindow("w", 1, 1, 1, window).first_needed(position) == read[0]


def test_full_attention_reads_every_token() -> None:
    assert FullAttention("f", 1, 1, 1).first_needed(100) == 0


def test_block_holds_keys_and_values_of_all_layers() -> None:
    full = FullAttention("f", num_layers=3, num_kv_heads=2, head_size=64)
    assert full.block_bytes(block_size=16, dtype_bytes=2) == 3 * 2 * 16 * 2 * 64 * 2
    window = SlidingWindow("w", num_layers=3, num_kv_heads=2, head_size=64, window=128)
    assert window.block_bytes(16, 2) == full.block_bytes(16, 2)
