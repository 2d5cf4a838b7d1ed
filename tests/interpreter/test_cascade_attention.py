"""Cascade attention under Triton's interpreter: the shared prefix is found and read once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_testing.attention import Rows, attend, attends, limits_of, make_fixture

from tokenspeed_core.api.attention import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_core.worker.slots import SHARED_PREFIX, SHORT
from tokenspeed_kernels.options import MAX_SPLITS, AttentionOptions
from tokenspeed_kernels.reference.cache import MIN_SHARED_TOKENS, MIN_SHARING_ROWS
from tokenspeed_kernels.triton.attention.backend import LONG_SPLIT, TritonAttention
from tokenspeed_kernels.triton.attention.cascade import (
    BLOCK_N,
    MERGED_PARTS,
    SharedPrefix,
)

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about log2(0).
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
# One KV head, since the interpreter is slow. The tests of sinks have two.
PROBLEM = AttentionProblem("decode", 2, 1, 16, "float32", "float32", 64, 0.25, None)
LENGTHS = (400, 350, 330, 600, 345, 401, 377, 328, 390)
assert len(LENGTHS) == MIN_SHARING_ROWS


def rows_of(seq_lens: tuple[int, ...], num_shared: int) -> Rows:
    return Rows((1,) * len(seq_lens), seq_lens, num_shared)


@pytest.mark.parametrize(
    ("rows", "num_found"),
    [
        pytest.param(rows_of(LENGTHS, 0), 0, id="nothing shared"),
        pytest.param(rows_of(LENGTHS, 192), 0, id="too little shared"),
        pytest.param(rows_of((0, *LENGTHS[1:]), 0), 0, id="too few rows"),
        pytest.param(rows_of(LENGTHS, 320), 320, id="shared"),
        pytest.param(rows_of((*LENGTHS, 0, 0), 320), 320, id="padding rows"),
        pytest.param(rows_of((320, *LENGTHS), 320), 256, id="a row without private keys"),
        pytest.param(
            rows_of((641, *(300 + each for each in LENGTHS[:2]), *(650,) * 6), 640),
            640,
            id="several splits",
        ),
    ],
)
def test_shared_prefix_is_found_and_attended_to(rows: Rows, num_found: int) -> None:
    fixture = make_fixture(PROBLEM, rows, CPU, seed=0)
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    padded = rows.seq_lens.index(0) if 0 in rows.seq_lens else len(rows.seq_lens)
    if any(rows.seq_lens[padded:]):  # the kit compares only rows before the first padding row
        attend(kernel, fixture)
    else:
        attends(kernel, PROBLEM, fixture, rows)
    assert int(kernel.shared.found[0]) == num_found


def test_padding_rows_are_skipped() -> None:
    rows = rows_of((0, *LENGTHS[:4], 0, *LENGTHS[4:]), 0)
    fixture = make_fixture(PROBLEM, rows, CPU, seed=0)
    table = fixture.step.block_table
    together = make_fixture(PROBLEM, rows_of(LENGTHS, 320), CPU, seed=1)
    real = torch.tensor([1, 2, 3, 4, 6, 7, 8, 9, 10])
    table.fill_(-1)
    table[real, : together.step.block_table.shape[1]] = together.step.block_table
    fixture.q[real] = together.q
    out = torch.full(fixture.q.shape, float("nan"))
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    kernel.prepare(fixture.step)
    kernel.forward(fixture.q, together.k_cache, together.v_cache, out)
    assert kernel.shared.found.tolist() == [320, 1]
    assert not out.isnan().any()
    torch.testing.assert_close(out[real], together.expected, rtol=1e-4, atol=1e-4)


def test_each_forward_finds_the_shared_prefix_again() -> None:
    fixture = make_fixture(PROBLEM, rows_of(LENGTHS, 320), CPU, seed=0)
    other = make_fixture(PROBLEM, rows_of(LENGTHS, 0), CPU, seed=1)
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    attend(kernel, fixture)
    for step_tensor in ("block_table", "seq_lens"):
        getattr(fixture.step, step_tensor).copy_(getattr(other.step, step_tensor))
    arena = torch.zeros((other.k_cache.shape[0], *fixture.k_cache.shape[1:]))
    caches = [arena.clone(), arena.clone()]
    caches[0].copy_(other.k_cache)
    caches[1].copy_(other.v_cache)
    out = torch.empty(fixture.q.shape)
    kernel.prepare(fixture.step)
    # Two forwards after one `prepare`, like capture and replay.
    for seen in (other, other):
        kernel.forward(seen.q, caches[0], caches[1], out)
        torch.testing.assert_close(out, other.expected, rtol=1e-4, atol=1e-4)
        assert int(kernel.shared.found[0]) == 0
        kernel.shared.found.fill_(64)  # a stale length must not be used


def test_split_row_is_merged_in_each_forward() -> None:
    rows = rows_of((3000,), 0)
    fixture = make_fixture(PROBLEM, rows, CPU, seed=0)
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    # The second forward needs the counters reset by the first.
    for _ in range(2):
        attends(kernel, PROBLEM, fixture, rows)


def test_no_search_if_the_host_rules_out_sharing() -> None:
    assert SHARED_PREFIX <= MIN_SHARED_TOKENS
    assert SHORT <= LONG_SPLIT, "short rows are not split"
    fixture = make_fixture(PROBLEM, rows_of(LENGTHS, 320), CPU, seed=0)
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    kernel.shared.found.fill_(320)  # as left by the previous step
    kernel.prepare(replace(fixture.step, shares_prefix=False))
    assert kernel._launch is not None and kernel._launch.shared is None
    out = torch.empty(fixture.q.shape)
    kernel.forward(fixture.q, fixture.k_cache, fixture.v_cache, out)
    torch.testing.assert_close(out, fixture.expected, rtol=1e-4, atol=1e-4)
    assert int(kernel.shared.found[0]) == 320


def test_rows_with_several_queries_use_no_shared_prefix() -> None:
    rows = Rows((2,) * MIN_SHARING_ROWS, LENGTHS, 320)
    fixture = make_fixture(PROBLEM, rows, CPU, seed=0)
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    attends(kernel, PROBLEM, fixture, rows)
    assert int(kernel.shared.found[0]) == 0


@pytest.mark.parametrize(("num_heads", "head_size", "num_rows"), [(16, 16, 10), (7, 48, 10)])
def test_shared_prefix_with_several_tiles_of_rows(
    num_heads: int, head_size: int, num_rows: int
) -> None:
    problem = replace(PROBLEM, num_heads=num_heads, num_kv_heads=1, head_size=head_size)
    rows = rows_of(tuple(300 + 3 * row for row in range(num_rows)), 256)
    fixture = make_fixture(problem, rows, CPU, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), CPU)
    launch = kernel.shared.launch(num_rows)
    assert launch is not None
    assert launch.num_tiles > 1
    attends(kernel, problem, fixture, rows)
    assert int(kernel.shared.found[0]) == 256


@pytest.mark.parametrize("num_rows", [9, 31, 70])
@pytest.mark.parametrize("first_odd", [0, 17, 31, 32, 255, 256, 257, 511, 600, 1000])
def test_shared_prefix_ends_at_the_first_difference(num_rows: int, first_odd: int) -> None:
    block_size, num_columns = 8, 640
    generator = torch.Generator().manual_seed(num_rows + first_odd)
    table = torch.randint(1000, (1, num_columns), dtype=torch.int32, generator=generator).repeat(
        num_rows, 1
    )
    odd_row = int(torch.randint(num_rows, (), generator=generator))
    if first_odd < num_columns:
        table[odd_row, first_odd] += 1
    seq_lens = torch.full((num_rows,), 605 * block_size, dtype=torch.int32)
    problem = replace(PROBLEM, block_size=block_size)
    shared = SharedPrefix(
        problem, AttentionLimits(num_rows, num_rows, 8 * num_columns, num_columns), CPU, 16, 16
    )
    shared.find(
        AttentionStep(
            num_rows,
            num_rows,
            1,
            8 * num_columns,
            torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens,
            table,
            None,
            None,
        )
    )
    expected = min(first_odd * block_size, 605 * block_size - 1) // BLOCK_N * BLOCK_N
    assert shared.found.tolist() == [expected if expected >= MIN_SHARED_TOKENS else 0, 0]


def test_shared_prefix_with_an_fp8_cache() -> None:
    problem = replace(PROBLEM, dtype="float16", kv_dtype="float8_e4m3fn")
    rows = rows_of(LENGTHS, 320)
    fixture = make_fixture(problem, rows, CPU, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), CPU)
    attends(kernel, problem, fixture, rows)
    assert int(kernel.shared.found[0]) == 320


@pytest.mark.parametrize(
    "rows", [rows_of(LENGTHS, 320), rows_of((641, *(650,) * 8), 640), rows_of((3000, 5), 0)]
)
def test_sinks_count_once_in_merged_parts(rows: Rows) -> None:
    problem = replace(PROBLEM, num_heads=4, num_kv_heads=2, soft_cap=1.0, has_sinks=True)
    fixture = make_fixture(problem, rows, CPU, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), CPU)
    attends(kernel, problem, fixture, rows)
    assert int(kernel.shared.found[0]) == rows.num_shared


def test_options_disable_splits_and_sharing() -> None:
    rows = rows_of(LENGTHS, 320)
    fixture = make_fixture(PROBLEM, rows, CPU, seed=0)
    whole = AttentionOptions(max_splits=1, shared_prefix=False)
    kernel = TritonAttention(PROBLEM, limits_of(fixture), CPU, options=whole)
    attends(kernel, PROBLEM, fixture, rows)
    assert kernel._launch is not None
    assert (kernel._launch.num_splits, kernel._launch.shared) == (1, None)
    usual = TritonAttention(PROBLEM, limits_of(fixture), CPU)
    usual.prepare(fixture.step)
    assert usual._launch is not None and usual._launch.shared is not None
    assert MAX_SPLITS == MERGED_PARTS**2
