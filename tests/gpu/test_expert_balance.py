"""Experts that may move, on a GPU: routing in a captured graph, and the weights of a mapped checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed_core.api import ExpertBalance, ParallelLayout
from tokenspeed_core.executor.expert_placement import NUM_TURNS, turn_table
from tokenspeed_models.layers.local_experts import BalancedExperts
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild

pytestmark = pytest.mark.gpu


def test_captured_step_counts_experts_and_follows_moves() -> None:
    layouts = [ParallelLayout.of(rank, experts=2) for rank in range(2)]
    balance = ExpertBalance(4, NUM_TURNS)
    build = DenseBuild(device="cuda", layout=layouts[1])
    experts = BalancedExperts(build, 16, balance)
    experts.let_move(())
    (movable,) = balance.layers
    ids = torch.zeros(33, 4, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        experts.choose(ids)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = experts.choose(ids)
    movable.loads.zero_()
    placement = np.asarray([[*range(8), 9, 15], [*range(8, 16), 0, 15]], np.int32)
    generator = torch.Generator().manual_seed(1)
    on_host = BalancedExperts(DenseBuild(layout=layouts[1]), 16, balance)
    on_host.let_move(())
    movable_on_host = balance.layers[1]
    for table in (None, turn_table(placement, 1, 16)):
        given = torch.rand(33, 16, generator=generator).topk(4).indices.to(torch.int32)
        if table is not None:
            for each in (movable, movable_on_host):
                each.table.copy_(torch.from_numpy(table))
        ids.copy_(given)
        graph.replay()
        assert torch.equal(slots.cpu(), on_host.choose(given))
    assert torch.equal(movable.loads.cpu(), movable_on_host.loads)
    assert int(movable.loads.sum()) == 2 * ids.numel()


def test_mapped_tensors_of_all_dtypes_reach_the_device(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(65, 33, generator=generator)
    weights = {
        f"{dtype}": values.to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
    }
    save_file(weights, tmp_path / "model.safetensors")
    model: Any = None  # the reader does not use it
    found = dict(read_safetensors(str(tmp_path), model, lambda done, total: None))
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.cuda().cpu().float(), weights[name].float())
