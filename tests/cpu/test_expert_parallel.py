"""Expert parallelism: which experts a process computes."""

from __future__ import annotations

import torch
from process_pool import RankBuild, Sizes
from torch.utils.flop_counter import FlopCounterMode

from tokenspeed_kernels.reference import moe
from tokenspeed_models.layers.experts import Experts


def test_process_computes_only_its_own_experts() -> None:
    num_tokens, sizes = 33, {"num_experts": 8, "top_k": 3, "hidden_size": 40}
    x, rows = torch.randn(num_tokens, 40), []
    weights = torch.rand(num_tokens, 3)
    ids = torch.rand(num_tokens, 8).argsort(dim=1)[:, :3].to(torch.int32)
    ids[ids == 0] = 1  # the first expert has no tokens
    for rank in range(2):
        build = RankBuild(Sizes(experts=2).layout(rank))
        layer = Experts(build, **sizes, intermediate_size=24)
        for weight in (layer.gate_up, layer.down):
            weight.normal_()
        problem = {**sizes, "num_experts": 4, "intermediate_size": 24, "dtype": "float32"}
        layer._experts = moe.moe_experts(problem)  # the reference kernel
        if rank == 0:  # its weights are not read
            layer.gate_up[0], layer.down[0] = float("nan"), float("nan")
        with FlopCounterMode(display=False) as counter:
            result = layer(x, weights, ids)
        assert result.isfinite().all()
        num_pairs = int(((ids >= 4 * rank) & (ids < 4 * rank + 4)).sum())
        assert counter.get_total_flops() == num_pairs * 2 * (40 * 48 + 24 * 40)
        rows.append(num_pairs)
    assert sum(rows) == ids.numel() and min(rows) > 0
