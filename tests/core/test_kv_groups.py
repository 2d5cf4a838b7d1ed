"""Cache groups answer by lengths alone, as attention and states read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_core.api.cache_groups import FullAttention, RecurrentState, SlidingWindow


@given(st.integers(1, 50), st.integers(0, 200))
def test_a_window_needs_the_querys_own_token_and_those_before_it_up_to_its_size(
    window: int, position: int
) -> None:
    read = [key for key in range(position + 1) if position - key < window]
    assert SlidingWindow("w", 1, 1, 1, window).first_needed(position) == read[0]


def test_full_attention_needs_everything_and_a_state_only_itself() -> None:
    assert FullAttention("f", 1, 1, 1).first_needed(100) == 0
    assert RecurrentState("s", 1, 8).first_needed(100) == 100


def test_a_block_holds_keys_and_values_of_all_its_layers() -> None:
    full = FullAttention("f", num_layers=3, num_kv_heads=2, head_size=64)
    assert full.block_bytes(block_size=16, dtype_bytes=2) == 3 * 2 * 16 * 2 * 64 * 2
    window = SlidingWindow("w", num_layers=3, num_kv_heads=2, head_size=64, window=128)
    assert window.block_bytes(16, 2) == full.block_bytes(16, 2)


def test_a_state_is_as_large_whatever_a_block_holds() -> None:
    state = RecurrentState("s", num_layers=5, state_bytes=1000)
    assert state.block_bytes(16, 2) == state.block_bytes(64, 4) == 5000


def test_only_states_are_recurrent() -> None:
    groups = (
        FullAttention("f", 1, 1, 1),
        SlidingWindow("w", 1, 1, 1, 4),
        RecurrentState("s", 1, 8),
    )
    assert [group.is_recurrent for group in groups] == [False, False, True]
