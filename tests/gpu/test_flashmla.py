"""FlashMLA on a Hopper device: all declared problems, CUDA graphs, padding rows and unwritten memory."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from tokenspeed_kernels_hopper import FLASHMLA
from tokenspeed_testing.conformance import check

from tokenspeed_kernels.reference.mla import mla_decode
from tokenspeed_kernels.triton.mla.heads import mla_absorb, mla_project

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LATENT, ROPE, BLOCK_SIZE, MAX_LEN = 512, 64, 64, 1024


def load_failure() -> str:
    """Return why the library cannot be used, "" if it can."""
    try:
        import_module("flash_mla")
    except Exception as error:  # a library for another torch raises OSError or ImportError
        return f"{type(error).__name__}: {error}; {FLASHMLA.obtain}"
    return ""


FAILURE = load_failure() if IS_HOPPER else ""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a device of compute capability 9.0"),
    pytest.mark.skipif(bool(FAILURE), reason=f"the library does not load: {FAILURE}"),
]


def problem_of(num_heads: int) -> dict[str, object]:
    return {
        "phase": "decode",
        "num_heads": num_heads,
        "latent_size": LATENT,
        "rope_size": ROPE,
        "block_size": BLOCK_SIZE,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    }


@pytest.mark.parametrize("num_heads", [1, 7, 16, 128])
def test_backend_conforms(num_heads: int) -> None:
    cases = [problem_of(num_heads)]
    assert check(FLASHMLA, torch.device("cuda"), cases=cases, num_rows=(0, 7, 150)) == 6


@pytest.mark.parametrize("num_heads", [7, 16, 128])
@pytest.mark.parametrize("num_rows", [3, 40, 160])
def test_replays_follow_the_lengths_of_their_step(num_rows: int, num_heads: int) -> None:
    problem = problem_of(num_heads)
    width, num_columns = LATENT + ROPE, MAX_LEN // BLOCK_SIZE
    blocks = torch.randperm(num_rows * num_columns, dtype=torch.int32, device="cuda")
    with torch.device("cuda"):
        cache = torch.empty(blocks.numel(), BLOCK_SIZE, width, dtype=torch.bfloat16)
        q = torch.randn(num_rows, num_heads, width, dtype=torch.bfloat16)
        table = torch.zeros(num_rows, num_columns, dtype=torch.int32)
        lengths = torch.zeros(num_rows, dtype=torch.int32)
    kernel, expect = FLASHMLA.factory()(problem), mla_decode(problem)

    def run() -> torch.Tensor:
        result: torch.Tensor = kernel(q, cache, table, lengths, MAX_LEN, width**-0.5, None)
        return result

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for longest, padding in ((MAX_LEN, 0), (1, 0), (500, 1), (65, num_rows // 2), (9, num_rows)):
        step_lengths = torch.randint(1, longest + 1, (num_rows,), dtype=torch.int32)
        step_lengths[num_rows - padding :] = 0
        lengths.copy_(step_lengths)
        table.copy_(blocks.view(num_rows, -1))
        cache.fill_(float("nan"))
        for row, length in enumerate(step_lengths.tolist()):
            num_used = -(-length // BLOCK_SIZE)
            table[row, num_used:] = -1
            entries = torch.randn(length, width, dtype=torch.bfloat16, device="cuda")
            position = torch.arange(length, device="cuda")
            cache[table[row, position // BLOCK_SIZE].long(), position % BLOCK_SIZE] = entries
        graph.replay()
        expected = expect(q, cache, table, lengths, MAX_LEN, width**-0.5)
        torch.testing.assert_close(y, expected, atol=1e-2, rtol=3e-2)
        assert torch.equal(y, run())


@pytest.mark.parametrize("num_rows", [1, 16, 30, 64, 256])
def test_each_kernel_of_a_layer_waits_for_the_one_before(num_rows: int) -> None:
    num_heads, head_size, num_layers = 16, 128, 8
    width, num_columns = LATENT + ROPE, MAX_LEN // BLOCK_SIZE
    sizes = {"num_heads": num_heads, "latent_size": LATENT, "rope_size": ROPE, "dtype": "bfloat16"}
    sizes |= {"nope_size": head_size, "value_size": head_size}
    absorb, project = mla_absorb(sizes), mla_project(sizes)
    problem = problem_of(num_heads)
    decode, expect = FLASHMLA.factory()(problem), mla_decode(problem)
    with torch.device("cuda"):
        blocks = torch.randperm(num_rows * num_columns, dtype=torch.int32)
        arena = torch.randn(blocks.numel(), num_layers, BLOCK_SIZE, width, dtype=torch.bfloat16)
        q = torch.randn(num_rows, num_heads, head_size + ROPE, dtype=torch.bfloat16)
        kv_up = torch.randn(num_heads, 2 * head_size, LATENT, dtype=torch.bfloat16) / 16
        lengths = torch.randint(MAX_LEN // 2, MAX_LEN, (num_rows,), dtype=torch.int32)
        outs = torch.empty(num_layers, num_rows, num_heads, head_size, dtype=torch.bfloat16)
    table, scale = blocks.view(num_rows, -1), width**-0.5
    between: list[torch.Tensor] = []

    def run() -> None:
        schedule = decode.plan()
        between.clear()
        for layer, out in enumerate(outs):
            absorbed = absorb(q, kv_up)
            y = decode(absorbed, arena[:, layer], table, lengths, MAX_LEN, scale, schedule)
            project(y, kv_up, out)
            between.extend((absorbed, y))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    expected = torch.empty_like(outs)
    for layer, out in enumerate(expected):
        y = expect(absorb(q, kv_up), arena[:, layer], table, lengths, MAX_LEN, scale)
        project(y, kv_up, out)
    for _ in range(20):
        for each in between:
            each.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(outs, expected, atol=3e-2, rtol=3e-2)
