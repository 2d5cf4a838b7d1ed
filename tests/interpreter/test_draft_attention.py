"""Triton attention for decode rows with different numbers of draft tokens, as in a captured step with padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_testing.attention import Rows, compare, limits_of, make_fixture, run

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_kernels.triton.attention.backend import TritonAttention

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
NUM_PADDING = 3  # query tokens after the last row


@pytest.mark.parametrize(
    ("num_heads", "rows_of_tile", "window"), [(2, 16, None), (8, 64, None), (8, 64, 20)]
)
def test_rows_with_drafts_share_one_tile_each(
    num_heads: int, rows_of_tile: int, window: int | None
) -> None:
    problem = AttentionProblem("decode", num_heads, 2, 64, "float32", "float32", 16, 0.125, window)
    rows = Rows((9, 1, 3, 0, 0), (301, 40, 3, 0, 0))
    fixture = make_fixture(problem, rows, CPU, seed=0)
    count = fixture.step.num_tokens
    step = replace(
        fixture.step,
        num_tokens=count + NUM_PADDING,
        max_seq_len=1024,
        host_query_start=None,
        host_seq_lens=None,
    )
    kernel = TritonAttention(problem, replace(limits_of(fixture), max_model_len=1024), CPU)
    assert kernel.takes_drafts
    kernel.prepare(step)
    assert kernel._launch is not None
    assert kernel._launch.tiling.block_m == rows_of_tile
    assert kernel._launch.num_splits > 1
    q = torch.cat((fixture.q, torch.full_like(fixture.q[:NUM_PADDING], float("nan"))))
    out = torch.full(q.shape, float("nan"))
    run(kernel, replace(fixture, q=q), out)
    compare("drafts", problem, out[:count], fixture.expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("num_kv_heads", "rows", "num_tiles"),
    [
        (2, Rows((5,), (301,)), 3),
        (1, Rows((2, 0, 3), (700, 0, 3)), 6),
        (1, Rows((9,), (1024,)), 5),
        (1, Rows((2,), (1500,)), 1),  # 12 parts, merged in one pass
    ],
)
def test_queries_of_few_rows_have_several_tiles(
    num_kv_heads: int, rows: Rows, num_tiles: int, window: int | None
) -> None:
    problem = AttentionProblem(
        "decode", 4 * num_kv_heads, num_kv_heads, 64, "float32", "float32", 16, 0.125, window
    )
    fixture = make_fixture(problem, rows, CPU, seed=0)
    step = replace(fixture.step, max_seq_len=2048, host_query_start=None, host_seq_lens=None)
    fixture = replace(fixture, step=step)
    kernel = TritonAttention(problem, replace(limits_of(fixture), max_model_len=2048), CPU)
    kernel.prepare(step)
    assert kernel._launch is not None
    assert kernel._launch.num_tiles == num_tiles
    assert kernel._launch.num_splits > 1
    for _ in range(
        2
    ):  # the first run leaves the counts of arrived programs as the second needs them
        out = torch.full(fixture.q.shape, float("nan"))
        run(kernel, fixture, out)
        compare("spread drafts", problem, out, fixture.expected)


@pytest.mark.parametrize(("dtype", "rows_of_tile"), [("bfloat16", 128), ("float32", 64)])
def test_wide_groups_have_larger_tiles(dtype: str, rows_of_tile: int) -> None:
    problem = AttentionProblem("decode", 8, 1, 64, dtype, dtype, 16, 0.125, None)
    fixture = make_fixture(problem, Rows((9,), (64,)), CPU, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), CPU)
    kernel.prepare(fixture.step)
    assert kernel._launch is not None
    assert kernel._launch.tiling.block_m == rows_of_tile
    assert kernel._launch.is_decode == (dtype == "bfloat16")
