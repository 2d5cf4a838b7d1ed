"""The CPU kernels: when they are selected, and sampled tokens equal to those of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_kernels.cpu import sampling as cpu_sampling
from tokenspeed_kernels.reference import sampling as reference

NUM_ROWS = 84


@pytest.mark.parametrize(("size", "spread"), [(300, 3.0), (2000, 4.0), (2000, 0.2)])
def test_tokens_equal_those_of_a_full_sort(size: int, spread: float) -> None:
    torch.manual_seed(3)
    row = torch.arange(NUM_ROWS)
    logits = (torch.randn(NUM_ROWS, size) * spread * 4).round() / 4
    logits[5] = float("-inf")
    logits[5, 7:9] = 1.0
    logits[6] = 2.0
    columns = (
        torch.tensor([1.0, 0.7, 0.0, 1.5, 0.01])[row % 5],
        torch.tensor([0, 1, 5, 40, 0, 280, 10**9], dtype=torch.int32)[row % 7],
        torch.tensor([1.0, 0.9, 0.5, 1.0, 1e-6, 0.99])[row % 6],
        torch.tensor([0.0, 0.0, 0.05, 1.0])[row % 4],
        torch.randint(-(2**62), 2**62, (NUM_ROWS,)),
        row,
    )
    problem = {"vocab_size": size, "dtype": "float32"}
    found = cpu_sampling.sample(problem)(logits, *columns)
    assert torch.equal(found, reference.sample(problem)(logits, *columns))


@pytest.mark.parametrize(
    ("op", "problem"),
    [("sample", {"vocab_size": 1536}), ("advance_rows", {}), ("map_tokens", {"block_size": 16})],
)
def test_cpu_kernel_is_selected_on_a_cpu_only(op: str, problem: dict[str, Any]) -> None:
    kernels = [k for k in installed_kernels(Catalog.discover()) if k.spec.backend == "torch"]
    problem = {**problem, "dtype": "float32"}
    on_cpu = Selector(kernels, PlatformInfo("cpu")).select(op, problem)
    on_gpu = Selector(kernels, PlatformInfo("cuda", (9, 0))).select(op, problem)
    assert ".cpu." in on_cpu.spec.load
    assert ".reference." in on_gpu.spec.load
