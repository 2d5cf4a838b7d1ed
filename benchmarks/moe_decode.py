"""Time the routed experts of decode steps: the kernels for few tokens, and those that sort tokens by expert.

    python benchmarks/moe_decode.py [--model qwen3-30b-a3b] [--layers 8] [--check] [--json FILE]

Needs a CUDA device. A CUDA graph holds the layers one after another, each with different weights, so that no weight is
in the L2 cache. A layer routes its tokens and runs their experts. Bytes are those of the experts that serve a token,
each counted once; bandwidth is these bytes over the time. `--check` compares both paths with the reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tokenspeed_kernels.reference import moe
from tokenspeed_kernels.triton.moe import experts, few_tokens
from tokenspeed_kernels.triton.moe.few_tokens import FewTokens

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "num_experts": 128,
        "top_k": 8,
        "hidden_size": 2048,
        "intermediate_size": 768,
    },
    "deepseek-v2-lite": {
        "num_experts": 64,
        "top_k": 6,
        "hidden_size": 2048,
        "intermediate_size": 1408,
    },
    "deepseek-v3": {
        "num_experts": 256,
        "top_k": 8,
        "hidden_size": 7168,
        "intermediate_size": 2048,
    },
    "mixtral-8x7b": {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    },
}
ROUTING = {
    "score": "softmax",
    "renormalize": True,
    "scale": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "group_score": "max",
    "has_bias": False,
}
NUM_TOKENS = (1, 2, 3, 4, 6, 8, 16)
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Print a line for each number of tokens and path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=MODELS, default="qwen3-30b-a3b", help="model of the experts"
    )
    parser.add_argument("--layers", type=int, default=8, help="layers, each with different weights")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    arguments = parser.parse_args()
    problem = {**MODELS[arguments.model], "dtype": "bfloat16"}
    paths: dict[str, Experts] = {"few tokens": FewTokens(problem), "sorted": sorted_path(problem)}
    layers = [make_weights(problem) for _ in range(arguments.layers)]
    rows = []
    for num_tokens in NUM_TOKENS:
        for name, path in paths.items():
            if arguments.check:
                check(problem, path, layers[0], num_tokens)
            row = measure(problem, path, layers, num_tokens)
            rows.append({"model": arguments.model, "path": name, "tokens": num_tokens, **row})
            print(
                f"{arguments.model} {num_tokens:3} tokens, {name:10}: {row['microseconds']:7.2f} us per layer, "
                f"{row['megabytes']:7.2f} MB of {row['experts']:5.1f} experts, {row['terabytes']:5.2f} TB/s"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def sorted_path(problem: dict[str, Any]) -> Experts:
    """Return the experts without the kernels for few tokens."""
    with patch.object(few_tokens, "MAX_SIZE", 0):
        return experts.moe_experts(problem)


def make_weights(problem: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router [E, N], gate and up [E, 2I, N] and down [E, N, I]."""
    num_experts, size, inner = (
        problem["num_experts"],
        problem["hidden_size"],
        problem["intermediate_size"],
    )
    return (
        random(num_experts, size),
        random(num_experts, 2 * inner, size),
        random(num_experts, size, inner),
    )


def random(*shape: int) -> Tensor:
    """Return bfloat16 values of unit gain on the device."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)


def measure(
    problem: dict[str, Any],
    path: Experts,
    layers: list[tuple[Tensor, Tensor, Tensor]],
    num_tokens: int,
) -> dict[str, float]:
    """Return the time of a layer and the bytes that it must read."""
    axes = {name: problem[name] for name in ("num_experts", "top_k")}
    route = experts.moe_route({**axes, **ROUTING, "dtype": "bfloat16"})
    x = torch.randn(num_tokens, problem["hidden_size"], dtype=torch.bfloat16, device="cuda")
    logits = [x @ router.T for router, _, _ in layers]

    def run() -> None:
        for each, (_, gate_up, down) in zip(logits, layers, strict=True):
            path(x, gate_up, down, *route(each, None))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(layers))
    used = statistics.mean(len(set(route(each, None)[1].flatten().tolist())) for each in logits)
    num_bytes = used * 3 * problem["hidden_size"] * problem["intermediate_size"] * 2
    microseconds = statistics.median(times)
    return {
        "microseconds": microseconds,
        "experts": used,
        "megabytes": num_bytes / 1e6,
        "terabytes": num_bytes / microseconds / 1e6,
    }


def check(
    problem: dict[str, Any], path: Experts, layer: tuple[Tensor, Tensor, Tensor], num_tokens: int
) -> None:
    """Raise AssertionError if a path differs from the reference, or reads experts that serve no token."""
    _, gate_up, down = layer
    x = torch.randn(num_tokens, problem["hidden_size"], dtype=torch.bfloat16, device="cuda")
    shape = num_tokens, problem["num_experts"]
    ids = torch.rand(shape, device="cuda").argsort(dim=1)[:, : problem["top_k"]].to(torch.int32)
    weights = torch.rand(ids.shape, device="cuda")
    expected = moe.moe_experts(problem)(x, gate_up, down, weights, ids)
    idle = torch.ones(problem["num_experts"], dtype=torch.bool, device="cuda")
    idle[ids.long()] = False
    kept = gate_up[idle].clone(), down[idle].clone()
    gate_up[idle], down[idle] = float("nan"), float("nan")
    found = path(x, gate_up, down, weights, ids)
    gate_up[idle], down[idle] = kept
    error = float((found - expected).float().norm() / expected.float().norm())
    assert error < 2e-2, f"{num_tokens} tokens: relative error {error:.2e}"


if __name__ == "__main__":
    main()
