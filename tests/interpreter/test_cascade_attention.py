"""Cascade attention under Triton's interpreter: the shared prefix is found and read once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_testing.attention import Rows, attend, attends, limits_of, make_fixture

from tokenspeed_core.api.attention import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_core.worker.slots import SHARED_PREFIX, SHARING_ROWS, SHORT
from tokenspeed_kernels.options import MAX_SPLITS, AttentionOptions
from tokenspeed_kernels.reference.cache import (
    DEPTH_FACTOR,
    MAX_CANDIDATES,
    MIN_SHARED_TOKENS,
    MIN_SHARING_ROWS,
)
from tokenspeed_kernels.triton.attention.backend import LONG_SPLIT, TritonAttention
from tokenspeed_kernels.triton.attention.cascade import (
    BLOCK_N,
    MERGED_PARTS,
    PART,
    SharedLaunch,
    SharedPrefix,
)
from tokenspeed_kernels.triton.attention.shared_prefix import MANY_ROWS

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
        pytest.param(Rows((1,) * 11, (*LENGTHS, 333, 3), 320, (9, 10)), 320, id="other rows"),
        pytest.param(rows_of((320, *LENGTHS), 320), 320, id="a row without private keys"),
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
    assert kernel.shared.found.tolist() == [320, 1, *(320 * (row in real) for row in range(11))]
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
    assert SHARING_ROWS <= MIN_SHARING_ROWS
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


@pytest.mark.parametrize(
    ("num_heads", "head_size", "num_rows"),
    [(16, 16, 10), pytest.param(7, 48, 10, marks=pytest.mark.release)],
)
def test_shared_prefix_with_several_tiles_of_rows(
    num_heads: int, head_size: int, num_rows: int
) -> None:
    problem = replace(PROBLEM, num_heads=num_heads, num_kv_heads=1, head_size=head_size)
    rows = rows_of(tuple(300 + 3 * row for row in range(num_rows)), 256)
    fixture = make_fixture(problem, rows, CPU, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), CPU)
    launch = kernel.shared.launch(num_rows, 64, 8)
    assert launch is not None
    assert launch.num_tiles > 1
    attends(kernel, problem, fixture, rows)
    assert int(kernel.shared.found[0]) == 256


def found_in(table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> list[int]:
    """Return what the backend finds in a block table."""
    num_rows, num_columns = table.shape
    limits = AttentionLimits(num_rows, num_rows, block_size * num_columns, num_columns)
    shared = SharedPrefix(replace(PROBLEM, block_size=block_size), limits, CPU, 16, 16)
    start = torch.arange(num_rows + 1, dtype=torch.int32)
    max_len = block_size * num_columns
    launch = shared.launch(num_rows, 1024, 64)
    assert launch is not None
    step = AttentionStep(num_rows, num_rows, 1, max_len, start, seq_lens, table, None, None)
    shared.find(step, launch, MAX_SPLITS)
    check_parts(shared, launch, seq_lens)
    found: list[int] = shared.found.tolist()
    return found


def check_parts(shared: SharedPrefix, launch: SharedLaunch, seq_lens: torch.Tensor) -> None:
    """Check that the parts cover the keys that rows do not share, and that smaller ones would be too many."""
    parts = shared.parts[: 4 * launch.num_parts].view(-1, 4).tolist()
    sizes = [stop - start for row, _, start, stop in parts if row >= 0]
    size = max(PART, -(-max(sizes) // PART) * PART)
    starts, stops = shared.found[2:].tolist(), seq_lens.tolist()

    def counts(size: int) -> list[int]:
        return [
            max(-(-(stop - start) // size), 1) for start, stop in zip(starts, stops, strict=True)
        ]

    expected = [
        [row, index << 16 | count, starts[row] + index * size]
        + [min(starts[row] + (index + 1) * size, stops[row])]
        for row, count in enumerate(counts(size))
        for index in range(count)
    ]
    assert parts[: len(expected)] == expected
    assert all(row == -1 for row, *_ in parts[len(expected) :])
    assert max(counts(size)) <= MAX_SPLITS
    smaller = counts(size - PART) if size > PART else []
    assert not smaller or sum(smaller) > launch.num_parts or max(smaller) > MAX_SPLITS


def most_saved(table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> int:
    """Return the most tokens times rows that a group can share, by trying all rows as the one that leads."""
    most = 0
    for lead in range(len(table)):
        usable = (torch.minimum(seq_lens, seq_lens[lead]) - 1).clamp(min=0) // block_size
        is_equal = (table == table[lead]) & (torch.arange(table.shape[1]) < usable[:, None])
        tokens = is_equal.int().cumprod(1).sum(1) * block_size // BLOCK_N * BLOCK_N
        for each in tokens[tokens >= MIN_SHARED_TOKENS].unique().tolist():
            count = int((tokens >= each).sum())
            most = max(most, count * each if count >= MIN_SHARING_ROWS else 0)
    return most


def equal_rows(num_rows: int, num_columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    row = torch.randint(1000, (1, num_columns), dtype=torch.int32, generator=generator)
    return row.repeat(num_rows, 1)


@pytest.mark.parametrize(
    ("num_rows", "first_odd"),
    [*product((31, 70), (0, 32, 256, 511)), (MANY_ROWS + MIN_SHARING_ROWS - 1, 256)],
)
def test_row_with_other_blocks_does_not_shorten_the_prefix(num_rows: int, first_odd: int) -> None:
    table, odd_row = equal_rows(num_rows, 640), num_rows - 1 - first_odd % 7
    table[odd_row, first_odd:] += 1000
    found, lead, *each = found_in(table, torch.full((num_rows,), 4840, dtype=torch.int32), 8)
    assert found == 4832
    assert lead != odd_row
    assert each == [found * (row != odd_row) for row in range(num_rows)]


@pytest.mark.parametrize("first_odd", [0, 31, 32, 255, 256, 257, 511, 600, 1000])
def test_prefix_of_nine_rows_ends_at_the_first_difference(first_odd: int) -> None:
    table = equal_rows(MIN_SHARING_ROWS, 640)
    table[4, first_odd:] += 1000
    found, _, *each = found_in(table, torch.full((9,), 4840, dtype=torch.int32), 8)
    expected = min(first_odd * 8, 4839) // BLOCK_N * BLOCK_N
    assert found == (expected if expected >= MIN_SHARED_TOKENS else 0)
    assert each == [found] * 9


def test_rows_of_the_best_group_share() -> None:
    lengths = (
        *(2000 + row for row in range(12)),
        *(700,) * 5,
        *(500 + row for row in range(20)),
        0,
    )
    num_columns = 130
    table = torch.arange(38 * num_columns, dtype=torch.int32).view(38, -1)
    table[:12, :100] = table[0, :100]  # 12 rows share 1,600 tokens, five more of them 320
    table[12:17, :20] = table[0, :20]
    table[17:37, :25] = table[17, :25]  # 20 rows share 400
    order = torch.randperm(38, generator=torch.Generator().manual_seed(0))
    found, lead, *each = found_in(table[order], torch.tensor(lengths, dtype=torch.int32)[order], 16)
    assert found == 1600
    assert int(order[lead]) < 12
    assert each == [1600 if row < 12 else 0 for row in order.tolist()]


def test_many_rows_with_a_short_prefix_beat_few_with_a_long_one() -> None:
    table = torch.arange(49 * 80, dtype=torch.int32).view(49, -1)
    table[:9, :70] = table[0, :70]  # 9 rows share 1,120 tokens, the others 608
    table[9:, :38] = table[9, :38]
    found, lead, *each = found_in(table, torch.full((49,), 1280, dtype=torch.int32), 16)
    assert found == 608
    assert lead >= 9
    assert each == [0] * 9 + [608] * 40


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_group_saves_at_least_a_quarter_of_the_best(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    # With more rows, not each of them is a candidate, and the search may miss a group.
    num_rows = data.draw(st.integers(MIN_SHARING_ROWS, MAX_CANDIDATES))
    block_size = data.draw(st.sampled_from([8, 16, 64]))
    num_columns = 1600 // block_size
    table = torch.arange(num_rows * num_columns, dtype=torch.int32).view(num_rows, -1)
    for row in range(1, num_rows):  # a tree of prefixes
        parent = data.draw(st.integers(0, row - 1)) // data.draw(st.sampled_from([1, 4, 100]))
        depth = data.draw(st.sampled_from([0, 1, num_columns // 3, num_columns - 1]))
        table[row, :depth] = table[parent, :depth]
    seq_lens = torch.randint(1, 1600, (num_rows,), dtype=torch.int32, generator=generator)
    seq_lens[torch.rand(num_rows, generator=generator) < 0.1] = 0
    found, lead, *each = found_in(table, seq_lens, block_size)
    best = most_saved(table, seq_lens, block_size)
    assert sum(each) * DEPTH_FACTOR >= best
    for row, shared in enumerate(each):
        assert shared in (0, found)
        assert shared < seq_lens[row] or shared == 0
        num_blocks = -(-shared // block_size)
        assert torch.equal(table[row, :num_blocks], table[lead, :num_blocks])
    if found:
        assert sum(shared > 0 for shared in each) >= MIN_SHARING_ROWS
        assert found >= MIN_SHARED_TOKENS


def test_shared_prefix_with_an_fp8_cache() -> None:
    problem = replace(PROBLEM, dtype="float16", kv_dtype="float8_e4m3fn")
    rows = rows_of(LENGTHS, 320)
    fixture = make_fixture(problem, rows, CPU, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), CPU)
    attends(kernel, problem, fixture, rows)
    assert int(kernel.shared.found[0]) == 320


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(rows_of(LENGTHS, 320), marks=pytest.mark.release),
        rows_of((641, *(650,) * 8), 640),
        rows_of((3000, 5), 0),
    ],
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
