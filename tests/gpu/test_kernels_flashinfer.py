"""FlashInfer on a device: both phases, cascade attention, FP8 caches, CUDA graphs, and the demo model.

The library compiles each module at its first call, so only some of the declared problems are tested: head size 128 in
bfloat16, with bfloat16 and FP8 caches, with and without a window, and the demo model. To compile all in parallel
beforehand:

    for more in "128" "128 --window" "128 --kv-dtype float8_e4m3fn" "64"; do
        MAX_JOBS=4 python -m tokenspeed_kernels_flashinfer --head-size $more &
    done; wait
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache

import pytest
import torch
from tokenspeed_kernels_flashinfer import ATTENTION, attention_specs
from tokenspeed_kernels_flashinfer.__main__ import build, modules
from tokenspeed_kernels_flashinfer.compiled import compiled_modules
from tokenspeed_testing.attention import (
    Rows,
    attend,
    attends,
    attends_once,
    check_attention,
    limits_of,
    make_fixture,
)

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.attention import AttentionProblem, AttentionStep

HAS_LIBRARY = importlib.util.find_spec("flashinfer") is not None
IS_RECENT = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_RECENT, reason="needs a device of compute capability 8.0 or more"),
    pytest.mark.skipif(not HAS_LIBRARY, reason=f"needs its library: {ATTENTION[-1].obtain}"),
]

FACTORY = ATTENTION[-1].factory()
HEADS = ((32, 8), (7, 1), (4, 4), (64, 2))  # query and KV heads


def problem(
    phase: str,
    *,
    kv_dtype: str = "bfloat16",
    window: int | None = None,
    block_size: int = 16,
    heads: tuple[int, int] = (32, 8),
) -> AttentionProblem:
    return AttentionProblem(phase, *heads, 128, "bfloat16", kv_dtype, block_size, 128**-0.5, window)


@cache
def compiled(kv_dtype: str = "bfloat16", head_size: int = 128, *, has_window: bool = False) -> None:
    """Compile the modules of a test in parallel; the library would compile them one after the other."""
    build(modules("bfloat16", kv_dtype, head_size, has_window=has_window))


@pytest.mark.parametrize(
    ("kv_dtype", "window", "num_groupings"),
    [("bfloat16", None, 4), ("bfloat16", 20, 2), ("float8_e4m3fn", None, 2)],
    ids=["bfloat16", "window", "eight bits"],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_backend_conforms(
    phase: str, kv_dtype: str, window: int | None, num_groupings: int
) -> None:
    compiled(kv_dtype, has_window=window is not None)
    cases = [
        problem(phase, kv_dtype=kv_dtype, window=window, block_size=block_size, heads=heads)
        for heads, block_size in zip(HEADS[:num_groupings], (16, 32, 64, 128), strict=False)
    ]
    assert check_attention(ATTENTION[-1], torch.device("cuda"), cases=cases) == 6 * num_groupings


def test_captured_prefill_replays_on_other_lengths() -> None:
    compiled()
    device, given = torch.device("cuda"), problem("prefill")
    first = make_fixture(given, Rows((9, 5, 2), (20, 5, 40)), device, seed=1, max_len=256)
    second = make_fixture(given, Rows((1, 10, 3), (200, 90, 3)), device, seed=2, max_len=256)
    kernel = FACTORY(given, limits_of(first), device)
    step = replace(
        first.step, max_num_query=16, max_seq_len=256, host_query_start=None, host_seq_lens=None
    )
    fixture = replace(first, step=step)
    attend(kernel, fixture)
    kernel.prepare(step)
    out = torch.full_like(first.q, float("nan"), memory_format=torch.contiguous_format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.forward(first.q, first.k_cache, first.v_cache, out)
    for name in ("query_start", "seq_lens", "block_table"):
        getattr(step, name).copy_(getattr(second.step, name))
    first.q[:14].copy_(second.q)
    first.k_cache.copy_(second.k_cache)
    first.v_cache.copy_(second.v_cache)
    for _ in range(3):  # replanned in the same buffers
        kernel.prepare(step)
        graph.replay()
    torch.testing.assert_close(out[:14].float(), second.expected, rtol=3e-2, atol=3e-2)
    assert not out.isnan().any()


@pytest.mark.parametrize("size", [4, 200])
def test_captured_decodes_of_different_sizes_replay_together(size: int) -> None:
    compiled()
    device, given = torch.device("cuda"), problem("decode")
    lengths = tuple(20 + 37 * row % 300 for row in range(size))
    rows = Rows((1,) * size, lengths)
    fixture = make_fixture(given, rows, device, seed=0)
    kernel = FACTORY(given, limits_of(fixture), device)
    outs: list[torch.Tensor] = []
    graphs: list[torch.cuda.CUDAGraph] = []
    parts: list[AttentionStep] = []
    for num in (size, size // 2):
        step = replace(
            fixture.step,
            num_rows=num,
            num_tokens=num,
            query_start=fixture.step.query_start[: num + 1],
            seq_lens=fixture.step.seq_lens[:num],
            block_table=fixture.step.block_table[:num],
            host_query_start=None,
            host_seq_lens=None,
        )
        out = torch.full_like(fixture.q[:num], float("nan"), memory_format=torch.contiguous_format)
        kernel.prepare(step)
        kernel.forward(fixture.q[:num], fixture.k_cache, fixture.v_cache, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.forward(fixture.q[:num], fixture.k_cache, fixture.v_cache, out)
        outs, graphs, parts = [*outs, out], [*graphs, graph], [*parts, step]
    for _ in range(2):
        for out, graph, step in zip(outs, graphs, parts, strict=True):
            out.fill_(float("nan"))
            kernel.prepare(step)
            graph.replay()
            expected = fixture.expected[: len(out)]
            torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


def test_long_row_and_long_prefix_are_split() -> None:
    compiled()
    device = torch.device("cuda")
    attends_once(FACTORY, problem("decode"), device, Rows((1,), (3000,)))
    attends_once(
        FACTORY, problem("decode"), device, Rows((1,) * 32, tuple(range(1100, 1740, 20)), 1024)
    )


def test_steps_with_and_without_host_lengths_alternate() -> None:
    compiled()
    device, given = torch.device("cuda"), problem("prefill")
    rows = Rows((1, 1, 33, 200), (64, 700, 50, 456))
    fixture = make_fixture(given, rows, device, seed=0)
    kernel = FACTORY(given, limits_of(fixture), device)
    unknown = replace(
        fixture, step=replace(fixture.step, host_query_start=None, host_seq_lens=None)
    )
    for each in (fixture, unknown, fixture, unknown):
        attends(kernel, given, each, rows)


def test_compiled_modules_are_found_by_their_files() -> None:
    compiled()
    capability = torch.cuda.get_device_capability()
    plain = [
        module
        for module in compiled_modules()
        if module.compute_capability == capability
        and module.head_size == 128
        and module.dtype == module.kv_dtype == "bfloat16"
        and not module.has_window
    ]
    assert {phase for module in plain for phase in module.phases} == {"prefill", "decode"}
    specs = attention_specs(compiled_modules())
    assert [spec.needs_compile for spec in specs] == [False] * (len(specs) - 1) + [True]


@pytest.mark.parametrize(
    ("backend", "eager"),
    [("flashinfer", False), ({"prefill": "triton", "decode": "flashinfer"}, True)],
    ids=["both phases in graphs", "decodes without graphs"],
)
def test_demo_model_adds_numbers(backend: str | dict[str, str], eager: bool) -> None:
    compiled(head_size=64)
    sums = [(17 + 31 * i % 83, 12 + 47 * i % 79) for i in range(24)]
    with LLM(
        device="cuda",
        gpu_memory_utilization=0.3,
        max_num_seqs=16,
        attention_backend=backend,
        enforce_eager=eager,
    ) as llm:
        taken = {dict(op.problem)["phase"]: op.backend for op in llm.kernel_plan.find("attention")}
        assert taken == (
            backend if isinstance(backend, dict) else {"prefill": backend, "decode": backend}
        )
        chats = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
        answers = [
            output.outputs[0].text or ""
            for output in llm.chat(chats, SamplingParams(temperature=0))
        ]
    right = [
        answer.rstrip(".").endswith(str(a + b))
        for (a, b), answer in zip(sums, answers, strict=True)
    ]
    assert sum(right) >= 23, answers
