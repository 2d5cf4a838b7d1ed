"""The built-in cache groups."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_core.api import ModelInfo, ParallelLayout
from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    CachePart,
    FullAttention,
    SlidingWindow,
    local_cache_group,
    values_per_token,
)
from tokenspeed_core.checkpoint.resolve import check_cache_groups
from tokenspeed_core.errors import CheckpointError


@given(st.integers(1, 50), st.integers(0, 200))
def test_window_reads_its_own_token_and_those_before(window: int, position: int) -> None:
    read = [key for key in range(position + 1) if position - key < window]
    assert SlidingWindow("w", 1, 1, 1, window).first_needed(position) == read[0]


def test_full_attention_reads_every_token() -> None:
    assert FullAttention("f", 1, 1, 1).first_needed(100) == 0


def test_layers_keep_keys_and_values() -> None:
    full = FullAttention("f", num_layers=3, num_kv_heads=2, head_size=64)
    assert full.parts == (CachePart("k", (2, 64)), CachePart("v", (2, 64)))
    assert values_per_token(full) == 3 * 2 * 2 * 64
    window = SlidingWindow("w", num_layers=3, num_kv_heads=2, head_size=64, window=128)
    assert values_per_token(window) == values_per_token(full)


@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(1, 300))
def test_values_may_have_another_size_than_keys(
    num_layers: int, num_kv_heads: int, head_size: int, value_size: int
) -> None:
    full = FullAttention("f", num_layers, num_kv_heads, head_size, value_size)
    window = SlidingWindow("w", num_layers, num_kv_heads, head_size, 128, value_size)
    for group in (full, window):
        assert [part.shape[1] for part in group.parts] == [head_size, value_size]
        assert values_per_token(group) == num_layers * num_kv_heads * (head_size + value_size)
        for num_processes in (1, 2, 4, 8, 16):
            processes = ParallelLayout.of(0, attn=num_processes).group("attn")
            local = values_per_token(local_cache_group(group, processes))
            assert local == values_per_token(group) // min(num_processes, num_kv_heads)


@dataclass(frozen=True)
class RecurrentState:
    """A group that a plugin might declare: a state of a fixed size per sequence."""

    name: str
    num_layers: int
    state_bytes: int

    def first_needed(self, length: int) -> int:
        return length


@dataclass(frozen=True)
class Latent:
    """A group of another plugin: one vector per token."""

    name: str
    num_layers: int
    size: int

    @property
    def parts(self) -> tuple[CachePart, ...]:
        return (CachePart("latent", (self.size,)),)

    @property
    def window(self) -> None:
        return None

    def first_needed(self, length: int) -> int:
        return 0


def info(*groups: object) -> ModelInfo:
    return ModelInfo("Tiny", 7, 8, "float32", 1, 10, groups, (2,), None)  # type: ignore[arg-type]


FULL = FullAttention("full", 1, 1, 4)


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ((), "Tiny"),
        ((FULL, RecurrentState("state", 2, 100)), "'state' .RecurrentState"),
        ((Latent("latent", 2, 0),), "'latent'"),
        ((Latent("latent", 0, 8),), "'latent'"),
        ((FULL, Latent("full", 2, 8)), "'full'"),
    ],
)
def test_groups_without_values_per_token_are_refused(
    groups: tuple[CacheGroupSpec, ...], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        check_cache_groups(info(*groups))


def test_groups_of_plugins_are_accepted() -> None:
    check_cache_groups(info(FULL, Latent("latent", 2, 8)))
