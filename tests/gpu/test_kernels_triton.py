"""The portable Triton kernels on a device, including CUDA graphs, against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.attention import (
    Rows,
    attends,
    attends_once,
    check_attention,
    limits_of,
    make_fixture,
)
from tokenspeed_testing.conformance import check

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.attention.backend import TritonAttention

pytestmark = pytest.mark.gpu

ALL = [spec for specs in vars(descriptors).values() if isinstance(specs, tuple) for spec in specs]
SPECS = [
    spec for spec in ALL if isinstance(spec, KernelSpec) and "cuda" in spec.capability.platforms
]


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.op != "attention"], ids=lambda s: f"{s.backend}-{s.op}"
)
def test_kernel_conforms(spec: KernelSpec) -> None:
    check(spec, torch.device("cuda"))


@pytest.mark.parametrize("num_rows", [64, 65, 300])
def test_fp8_gemm_conforms_around_the_row_limit(num_rows: int) -> None:
    for spec in (spec for spec in SPECS if spec.op == "linear_fp8"):
        check(spec, torch.device("cuda"), num_rows=(num_rows,))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.op == "attention"], ids=lambda s: s.backend)
def test_paged_attention_conforms(spec: KernelSpec) -> None:
    check_attention(spec, torch.device("cuda"))


@pytest.mark.parametrize("window", [None, 128])
def test_long_whole_prompts_conform(window: int | None) -> None:
    problem = AttentionProblem(
        "prefill",
        16,
        4,
        128,
        "bfloat16",
        "bfloat16",
        16,
        128**-0.5,
        window,
        is_bidirectional=True,
    )
    rows = Rows((1, 1500, 40, 700, 3), (300, 1500, 900, 700, 3))
    factory = descriptors.TRITON_ATTENTION[0].factory()
    attends_once(factory, problem, torch.device("cuda"), rows)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, None), (128, None), (128, 30.0)], ids=["full", "window", "cap"]
)
def test_attention_with_sinks_conforms(
    phase: str, window: int | None, soft_cap: float | None
) -> None:
    problem = AttentionProblem(
        phase, 64, 8, 64, "bfloat16", "bfloat16", 16, 0.125, window, soft_cap, has_sinks=True
    )
    spec = descriptors.TRITON_ATTENTION[0]
    assert check_attention(spec, torch.device("cuda"), cases=[problem])


@pytest.mark.parametrize(
    ("num_heads", "rows"),
    [
        pytest.param(32, Rows((1,), (3000,)), id="one long row in many parts"),
        pytest.param(64, Rows((1,) * 5, (900, 30, 400, 129, 0)), id="eight query heads a key head"),
        pytest.param(
            32, Rows((1,) * 32, tuple(range(1100, 1740, 20)), 1024), id="keys that all rows share"
        ),
        pytest.param(
            32,
            Rows((1,) * 32, tuple(range(1100, 1740, 20)), 1024, (1, 5, 30)),
            id="keys that most rows share",
        ),
    ],
)
def test_split_rows_replay_bitwise_equal(num_heads: int, rows: Rows) -> None:
    device = torch.device("cuda")
    problem = AttentionProblem(
        "decode", num_heads, 8, 128, "bfloat16", "bfloat16", 16, 128**-0.5, None
    )
    fixture = make_fixture(problem, rows, device, seed=0)
    kernel = TritonAttention(problem, limits_of(fixture), device)
    attends(kernel, problem, fixture, rows)
    outs = [
        torch.full_like(fixture.q, float("nan"), memory_format=torch.contiguous_format)
        for _ in range(8)
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:  # layers, which share the buffers for partial results
            kernel.forward(fixture.q, fixture.k_cache, fixture.v_cache, out)
    graph.replay()
    first = outs[0].clone()
    for _ in range(50):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, first) for out in outs)
