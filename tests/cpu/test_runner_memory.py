"""The size of the KV arena, and errors about too little memory."""

from __future__ import annotations

import pytest

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.errors import CapacityError
from tokenspeed_core.worker.memory import (
    GIB,
    DeviceBudget,
    PoolLimits,
    pages_of_device,
    pages_of_host,
)

GROUP = FullAttention("full", num_layers=36, num_kv_heads=8, head_size=128)


def limits(max_model_len: int = 40960) -> PoolLimits:
    return PoolLimits.of([GROUP], 16, 2, max_model_len)


def budget(weights: int = 16 * GIB, utilization: float = 0.9) -> DeviceBudget:
    return DeviceBudget(140 * GIB, utilization, GIB, weights, 2 * GIB, GIB)


def test_page_holds_a_block_of_the_largest_group() -> None:
    small = FullAttention("small", num_layers=1, num_kv_heads=1, head_size=16)
    pool = PoolLimits.of([GROUP, small], 16, 2, 100)
    assert pool.page_bytes == 36 * 2 * 16 * 8 * 128 * 2
    assert pool.min_num_pages == 7 + 1
    assert PoolLimits.of([small], 16, 2, 100).page_bytes == 2 * 16 * 16 * 2


def test_pool_fills_the_device_except_a_padding_page() -> None:
    pages = pages_of_device(limits(), budget())
    left = int(140 * GIB * 0.9) - 20 * GIB
    assert (pages + 1) * limits().page_bytes <= left < (pages + 2) * limits().page_bytes


def test_pool_too_small_names_the_missing_memory_and_flags() -> None:
    with pytest.raises(CapacityError) as caught:
        pages_of_device(limits(), budget(weights=120 * GIB))
    message = str(caught.value)
    assert "3.63 GiB" in message
    assert "--max-model-len 14544" in message
    assert "--gpu-memory-utilization" in message


def test_oversized_weights_do_not_suggest_max_model_len() -> None:
    with pytest.raises(CapacityError) as caught:
        pages_of_device(limits(), budget(weights=200 * GIB))
    assert "--max-model-len" not in str(caught.value)


def test_max_total_tokens_counts_tokens_of_every_group() -> None:
    assert limits().pages_of_tokens(33) == 3
    two = PoolLimits.of([GROUP, FullAttention("other", 1, 1, 64)], 16, 2, 100)
    assert two.pages_of_tokens(32) == 2 + 1


def test_kv_cache_memory_error_names_the_minimum() -> None:
    assert limits().pages_of_bytes(10 * limits().page_bytes, "--kv-cache-memory") == 9
    with pytest.raises(CapacityError, match=str(2 * limits().page_bytes)):
        limits().pages_of_bytes(limits().page_bytes, "--kv-cache-memory")


def test_cpu_pool_takes_a_quarter_of_free_memory() -> None:
    assert pages_of_host(limits(128), 8 * GIB) == 2 * GIB // limits().page_bytes - 1
    assert pages_of_host(limits(1024), 800 * GIB) == 4 * GIB // limits().page_bytes - 1
    with pytest.raises(CapacityError, match="--kv-cache-memory"):
        pages_of_host(limits(), 4 * GIB)


def test_requested_cpu_pool_must_fit() -> None:
    pool = limits()
    assert pages_of_host(pool, 101 * pool.page_bytes, 100) == 100
    with pytest.raises(CapacityError, match="--max-total-tokens"):
        pages_of_host(pool, 100 * pool.page_bytes, 100)
