"""Latent attention on a GPU: large steps, which expand their entries, decodes with a shared prefix, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import agrees_with_reference, replays
from tokenspeed_testing.shapes import contract_of

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.options import SharedPrefixOptions
from tokenspeed_kernels.reference import mla as reference
from tokenspeed_kernels.triton.attention import shared_prefix
from tokenspeed_kernels.triton.attention.shared_prefix import find_shared_prefix
from tokenspeed_kernels.triton.mla.absorbed import mla_decode
from tokenspeed_kernels.triton.mla.prefill import MlaPrefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LITE: dict[str, Any] = {
    "num_heads": 16,
    "latent_size": 512,
    "rope_size": 64,
    "nope_size": 128,
    "value_size": 128,
    "block_size": 64,
    "phase": "prefill",
}


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("num_heads", "nope_size", "value_size"), [(16, 128, 128), (128, 128, 128), (20, 192, 256)]
)
def test_large_prefills_conform(
    num_heads: int, nope_size: int, value_size: int, kv_dtype: str
) -> None:
    spec = next(spec for spec in descriptors.TRITON_ATTENTION if spec.op == "mla_prefill")
    contract, device = contract_of(spec), torch.device("cuda")
    sizes = {"num_heads": num_heads, "nope_size": nope_size, "value_size": value_size}
    problem = {**LITE, **sizes, "dtype": "bfloat16", "kv_dtype": kv_dtype}
    kernel = MlaPrefill(problem, max_small_step=0, absorbed_tokens=32)
    for num_rows in (1, 6, 7):  # the host knows the lengths of odd numbers of rows
        agrees_with_reference(kernel, contract, problem, num_rows, device, strided=True)
    replays(kernel, contract, problem, 6, device)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_heads", [7, 16, 128])
def test_replays_read_the_shared_prefix_of_their_step(
    num_heads: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    min_reads = 12 * 320
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_READS", min_reads)
    num_rows, block_size, max_len = 32, 64, 7168
    problem = {**LITE, "phase": "decode", "num_heads": num_heads, "kv_dtype": kv_dtype}
    problem["dtype"] = "bfloat16"
    width = problem["latent_size"] + problem["rope_size"]
    own = torch.linspace(400, 2800, num_rows, dtype=torch.int32)
    num_columns = max_len // block_size
    blocks = torch.randperm(num_rows * num_columns, dtype=torch.int32).view(num_rows, -1)
    with torch.device("cuda"):
        cache = torch.randn(blocks.numel(), block_size, width).to(getattr(torch, kv_dtype))
        q = torch.randn(num_rows, num_heads, width, dtype=torch.bfloat16)
        table = torch.zeros(num_rows, num_columns, dtype=torch.int32)
        lengths = torch.zeros(num_rows, dtype=torch.int32)
    find, decode = find_shared_prefix(problem, SharedPrefixOptions()), mla_decode(problem)
    expect = reference.mla_decode(problem)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        shared = find(table, lengths)
        assert shared is not None
        return decode(q, cache, table, lengths, max_len, width**-0.5, shared), shared

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, shared = run()
    for num_shared, padding in ((4096, 0), (0, 0), (320, 19), (320, 20), (4160, 5), (4096, 32)):
        step_lengths, step_table = own + num_shared, blocks.clone()
        is_sharing = torch.arange(num_rows) < num_rows - padding
        is_sharing[3] = False  # this row has other blocks
        step_table[is_sharing, : num_shared // block_size] = blocks[0, : num_shared // block_size]
        step_lengths[num_rows - padding :] = 0
        lengths.copy_(step_lengths)
        table.copy_(step_table)
        graph.replay()
        each = num_shared * is_sharing
        each *= each.sum() >= min_reads
        assert shared.tolist() == [int(each.max()), 0, *each.tolist()]
        separate = decode(q, cache, table, lengths, max_len, width**-0.5)
        expected = expect(q, cache, table, lengths, max_len, width**-0.5)
        for found in (y, separate):
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)
