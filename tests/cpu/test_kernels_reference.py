"""The torch reference kernels pass the conformance kit on a CPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_testing.attention import Rows, attend, check_attention, limits_of, make_fixture
from tokenspeed_testing.conformance import check
from tokenspeed_testing.shapes import NUM_ROWS

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.targets import load_target
from tokenspeed_kernels import descriptors

CPU = torch.device("cpu")
TORCH = [
    spec
    for name, specs in sorted(vars(descriptors).items())
    if name.startswith("TORCH_")
    for spec in specs
]


# Like the same experts with scales per token.
IN_RELEASE = ("moe_experts_fp8_static", "moe_experts_int8_static")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=spec.op, marks=pytest.mark.release if spec.op in IN_RELEASE else ())
        for spec in TORCH
        if spec.op != "attention"
    ],
)
def test_reference_conforms(spec: KernelSpec) -> None:
    # Expanded keys and experts of many rows take long on a CPU.
    is_slow = spec.op.startswith(("mla_", "moe_experts"))
    check(spec, CPU, num_rows=(0, 1, 7) if is_slow else NUM_ROWS)


def test_every_op_has_a_reference() -> None:
    catalog = Catalog.discover(Selection())
    ops, kernels = installed_ops(catalog), installed_kernels(catalog)
    # The kernel of exchange_tokens is its reference, which users choose by the name alltoall.
    references = {
        kernel.spec.op
        for kernel in kernels
        if kernel.spec.reference or kernel.spec.load == ops[kernel.spec.op].reference
    }
    assert len(ops) > 20
    for op in ops.values():
        assert callable(load_target(op.reference)), op.name
        assert op.name in references or (op.parts and set(op.parts) <= set(ops)), op.name


def test_reference_attention_conforms() -> None:
    spec, *_ = descriptors.TORCH_ATTENTION
    assert check_attention(spec, CPU) > 30


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 1, 13])), min_size=1, max_size=4
    ),
    window=st.sampled_from([None, 1, 5, 12, 64]),
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    block_size=st.sampled_from([4, 16]),
)
def test_whole_prompts_equal_torch_with_an_explicit_mask(
    rows: list[tuple[int, int]], window: int | None, heads: tuple[int, int], block_size: int
) -> None:
    """Each row has new tokens after a number of earlier ones; without those it is a whole prompt."""
    num_heads, num_kv_heads = heads
    problem = AttentionProblem(
        "prefill",
        num_heads,
        num_kv_heads,
        8,
        "float32",
        "float32",
        block_size,
        0.3,
        window,
        is_bidirectional=True,
    )
    step = Rows(tuple(new for new, _ in rows), tuple(new + earlier for new, earlier in rows))
    fixture = make_fixture(problem, step, CPU, seed=0)
    spec, *_ = descriptors.TORCH_ATTENTION
    found = attend(spec.factory()(problem, limits_of(fixture), CPU), fixture)
    starts = fixture.step.query_start.tolist()
    for (new, earlier), table, (start, end) in zip(
        rows, fixture.step.block_table, pairwise(starts), strict=True
    ):
        length = new + earlier
        blocks = table[: -(-length // block_size)].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1)
            for cache in (fixture.k_cache, fixture.v_cache)
        )
        position, key = torch.arange(earlier, length)[:, None], torch.arange(length)
        seen = key <= position if earlier else torch.ones(length, length, dtype=torch.bool)
        if window is not None:
            seen = seen & ((key - position).abs() < window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            fixture.q[start:end].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=seen,
            scale=problem.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        torch.testing.assert_close(found[start:end], expected, rtol=1e-5, atol=1e-5)
