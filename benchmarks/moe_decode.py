# mypy: allow-untyped-calls
"""Time the routed experts of decode steps: the kernels for few tokens, and those that sort tokens by expert.

    python benchmarks/moe_decode.py [--models qwen3-30b-a3b …] [--form fp8-block] [--tokens 1 2 …] [--check] [--json FILE]
    python benchmarks/moe_decode.py --models gpt-oss-20b gpt-oss-120b --form biased-mxfp4 --check
    python benchmarks/moe_decode.py --form fp8-block --tokens 1 --tilings 2,4,4,8 2,4,2,4 4,8,4,8

Needs a CUDA device. A CUDA graph holds the layers one after another, each with different weights, so that no weight is
in the L2 cache. A layer routes its tokens and runs their experts. Bytes are those of the experts that serve a token,
each counted once; the bound is these bytes over the measured copy bandwidth. `--check` compares all paths with the
reference and with each other. `--tilings` are those of the kernels for few tokens: weight rows and warps per program,
of gate and up, then of the down projection.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kernels import ceilings
from tokenspeed_testing.conformance import reference
from torch import Tensor

from tokenspeed_core.api.ops import OpContract
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_kernels.triton.linear.gemv import Tiling
from tokenspeed_kernels.triton.moe import (
    biased_experts,
    experts,
    experts_w4a16,
    experts_w8a8,
    few_tokens,
)

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
    "gpt-oss-20b": {
        "num_experts": 32,
        "top_k": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
    },
    "gpt-oss-120b": {
        "num_experts": 128,
        "top_k": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
    },
}
GROUP = 128  # INT4 weights that share a scale
AXES = {"group_size": GROUP, "alpha": 1.702, "limit": 7.0, "dtype": "bfloat16"}
ROUTING = {
    "score": "softmax",
    "renormalize": True,
    "scale": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "group_score": "max",
    "has_bias": False,
}
COMPARED = ("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3")
NUM_TOKENS = (1, 2, 4, 8, 16)
MAX_SIZE = 16384  # features of a weight row that fit into the registers of a kernel for few tokens
MAX_LAYERS = 8
MAX_BYTES = 24 << 30  # of all layers
NUM_IDLE = 8  # unused experts that get NaN while paths are compared
BLOCK = 128  # side of a block that shares a scale
MX_GROUP = 32  # MXFP4 weights that share a scale
INT4_SIZE, E2M1_SIZE = 4.6, 2.9  # root mean squares of the values of all codes
Experts = Callable[..., Tensor]
Weights = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A form of weights.

    `make_weight` makes the operands of a weight [E, rows, columns]. `item_size` are the bytes of a weight element, with
    its part of a scale unless that is less than 1 %.
    """

    op: str
    make: Callable[[dict[str, Any]], Experts]
    make_weight: Callable[[int, int, int], Weights]
    item_size: float


def main() -> None:
    """Print a line for each model, number of tokens and path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=COMPARED, help="models of the experts"
    )
    parser.add_argument("--form", choices=FORMS, default="bfloat16", help="form of the weights")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=NUM_TOKENS, help="numbers of tokens"
    )
    parser.add_argument(
        "--tilings",
        type=tilings,
        nargs="+",
        default=[],
        metavar="ROWS,WARPS,ROWS,WARPS",
        help="other tilings of the kernels for few tokens",
    )
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    arguments = parser.parse_args()
    form = FORMS[arguments.form]
    contract = installed_ops(Catalog.discover())[form.op]
    bandwidth = ceilings(torch.device("cuda")).bandwidth
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows = []
    for model in arguments.models:
        problem = {**MODELS[model], **AXES}
        # All kernels first, so that background threads compile them together.
        paths = {"few tokens": few_path(form, problem), "sorted": sorted_path(form, problem)}
        for each in arguments.tilings:
            paths[f"few tokens {shown(each)}"] = few_path(form, problem, each)
        elements = 3 * problem["hidden_size"] * problem["intermediate_size"]
        layer_bytes = elements * problem["num_experts"] * form.item_size
        num_layers = max(1, min(MAX_LAYERS, int(MAX_BYTES / layer_bytes)))
        layers = [make_weights(form, problem) for _ in range(num_layers)]
        for num_tokens in arguments.tokens:
            if arguments.check:
                check(contract, problem, paths, layers[0][1], num_tokens)
            for name, path in paths.items():
                row = measure(problem, path, layers, num_tokens)
                num_bytes = row["experts"] * elements * form.item_size
                bound = num_bytes / bandwidth * 1e6
                row |= {"megabytes": num_bytes / 1e6, "bound": bound}
                row |= {"model": model, "form": arguments.form, "path": name, "tokens": num_tokens}
                rows.append(row)
                print(
                    f"{model:16} {num_tokens:3} tokens, {name:20}: {row['microseconds']:7.2f} us per layer, "
                    f"bound {bound:7.2f} ({bound / row['microseconds']:4.0%}), "
                    f"{row['megabytes']:7.2f} MB of {row['experts']:5.1f} experts",
                    flush=True,
                )
        del layers
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def tilings(text: str) -> tuple[Tiling, Tiling]:
    """Parse the tilings of both kernels for few tokens. Raises ValueError."""
    up_rows, up_warps, down_rows, down_warps = map(int, text.split(","))
    return Tiling(up_rows, up_warps), Tiling(down_rows, down_warps)


def shown(given: tuple[Tiling, Tiling]) -> str:
    """Return tilings as the command line takes them."""
    return ",".join(f"{each.block_n},{each.num_warps}" for each in given)


@contextmanager
def limited(max_size: int, pairs_per_expert: float) -> Iterator[None]:
    """Set the limits of the kernels for few tokens, for all forms of weights."""
    limits = max_size, pairs_per_expert
    with (
        patch.dict(few_tokens.LIMITS, dict.fromkeys(few_tokens.LIMITS, limits)),
        patch.object(few_tokens, "LIMITS_8_BITS", limits),
    ):
        yield


def few_path(
    form: Form, problem: dict[str, Any], chosen: tuple[Tiling, Tiling] | None = None
) -> Experts:
    """Return experts that use the kernels for few tokens for any number of tokens."""
    with ExitStack() as patches:
        patches.enter_context(limited(MAX_SIZE, 64.0))
        if chosen is not None:
            patches.enter_context(patch.object(few_tokens, "few_tilings", lambda *_: chosen))
        return form.make(problem)


def sorted_path(form: Form, problem: dict[str, Any]) -> Experts:
    """Return the experts without the kernels for few tokens."""
    with limited(0, 0.0):
        return form.make(problem)


def make_weights(form: Form, problem: dict[str, Any]) -> tuple[Tensor, Weights]:
    """Return a router [E, N], and the operands of the op: those of gate and up [E, 2I, N], and of down [E, N, I]."""
    num_experts, size, inner = (
        problem["num_experts"],
        problem["hidden_size"],
        problem["intermediate_size"],
    )
    gate_up = form.make_weight(num_experts, 2 * inner, size)
    down = form.make_weight(num_experts, size, inner)
    return random(num_experts, size), (*gate_up, *down)


def random(*shape: int) -> Tensor:
    """Return bfloat16 values of unit gain on the device."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def random_fp8(num_experts: int, rows: int, columns: int) -> Weights:
    """Return e4m3 values below 2 on the device, and per-channel scales that give about unit gain."""
    codes = random_bytes(num_experts, rows, columns)
    codes &= 0b10111111  # clear the highest bit of the exponent
    scale = torch.rand((num_experts, rows, 1), device="cuda") + 0.5
    return codes.view(torch.float8_e4m3fn), scale * 2 * columns**-0.5


def random_fp8_blocks(num_experts: int, rows: int, columns: int) -> Weights:
    """Return values as `random_fp8`, with block-wise scales."""
    codes, _ = random_fp8(num_experts, rows, columns)
    scale = torch.rand((num_experts, -(-rows // BLOCK), -(-columns // BLOCK)), device="cuda") + 0.5
    return codes, scale * 2 * columns**-0.5


def random_int4(num_experts: int, rows: int, columns: int) -> Weights:
    """Return packed integers on the device, scales that give about unit gain, no zero points and no order."""
    scale = torch.rand((num_experts, rows, columns // GROUP), device="cuda") + 0.5
    scale = (scale * columns**-0.5 / INT4_SIZE).to(torch.bfloat16)
    return random_bytes(num_experts, rows, columns // 2), scale, None, None


def random_mxfp4(num_experts: int, rows: int, columns: int) -> Weights:
    """Return packed E2M1 values on the device, and scales that give about unit gain."""
    exponent = 127 + round(math.log2(columns**-0.5 / E2M1_SIZE))
    shape = num_experts, rows, columns // MX_GROUP
    scale = torch.randint(exponent - 1, exponent + 2, shape, dtype=torch.uint8, device="cuda")
    return random_bytes(num_experts, rows, columns // 2), scale


def random_biased_mxfp4(num_experts: int, rows: int, columns: int) -> Weights:
    """Return values as `random_mxfp4`, and biases."""
    bias = torch.randn((num_experts, rows), dtype=torch.bfloat16, device="cuda")
    return *random_mxfp4(num_experts, rows, columns), bias


FORMS = {
    "bfloat16": Form("moe_experts", experts.moe_experts, lambda *shape: (random(*shape),), 2),
    "fp8": Form("moe_experts_fp8", experts_w8a8.moe_experts_fp8, random_fp8, 1),
    "fp8-block": Form(
        "moe_experts_fp8_block", experts_w8a8.moe_experts_fp8_block, random_fp8_blocks, 1
    ),
    "int4": Form(
        "moe_experts_w4a16", experts_w4a16.moe_experts_w4a16, random_int4, 0.5 + 2 / GROUP
    ),
    "mxfp4": Form(
        "moe_experts_mxfp4", experts_w4a16.moe_experts_mxfp4, random_mxfp4, 0.5 + 1 / MX_GROUP
    ),
    "biased-mxfp4": Form(
        "moe_biased_experts_mxfp4",
        biased_experts.moe_biased_experts_mxfp4,
        random_biased_mxfp4,
        0.5 + 1 / MX_GROUP,
    ),
}


def measure(
    problem: dict[str, Any], path: Experts, layers: list[tuple[Tensor, Weights]], num_tokens: int
) -> dict[str, Any]:
    """Return the time of a layer and its experts that serve a token."""
    axes = {name: problem[name] for name in ("num_experts", "top_k")}
    route = experts.moe_route({**axes, **ROUTING, "dtype": "bfloat16"})
    x = torch.randn(num_tokens, problem["hidden_size"], dtype=torch.bfloat16, device="cuda")
    logits = [x @ router.T for router, _ in layers]

    def run() -> None:
        for each, (_, operands) in zip(logits, layers, strict=True):
            path(x, *operands, *route(each, None))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(layers))
    used = statistics.mean(len(set(route(each, None)[1].flatten().tolist())) for each in logits)
    return {"microseconds": statistics.median(times), "experts": used}


def check(
    contract: OpContract,
    problem: dict[str, Any],
    paths: dict[str, Experts],
    operands: Weights,
    num_tokens: int,
) -> None:
    """Print the errors of all paths. Raise AssertionError if one is large, or if a path uses experts without tokens."""
    torch.manual_seed(0)
    shape = num_tokens, problem["num_experts"]
    x = torch.randn(num_tokens, problem["hidden_size"], dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(shape, device="cuda").argsort(dim=1)[:, : problem["top_k"]].to(torch.int32)
    weights = torch.rand(ids.shape, device="cuda")
    used = ids.unique().tolist()
    # The reference gets only these experts.
    place = torch.zeros(shape[1], dtype=torch.int32, device="cuda")
    place[used] = torch.arange(len(used), dtype=torch.int32, device="cuda")
    chosen = [
        None if each is None else torch.stack([each[expert] for expert in used])
        for each in operands
    ]
    given = [x, *chosen, weights, place[ids.long()]]
    named = {str(index): each for index, each in enumerate(given)}
    (expected,) = reference(contract, {**problem, "num_experts": len(used)}, named)
    idle = sorted({*range(shape[1])} - {*used})[:NUM_IDLE]
    changed = [each for each in operands if each is not None]
    kept = [[each[expert].clone() for expert in idle] for each in changed]
    for each in changed:
        for expert in idle:
            # 255 is the largest E8M0 scale.
            each[expert] = 255 if each.dtype == torch.uint8 else float("nan")
    results = {name: path(x, *operands, weights, ids) for name, path in paths.items()}
    for each, values in zip(changed, kept, strict=True):
        for expert, value in zip(idle, values, strict=True):
            each[expert] = value
    for name, found in results.items():
        error, difference = (
            float((found - other).float().norm() / other.float().norm())
            for other in (expected, results["sorted"])
        )
        print(f"{num_tokens:3} tokens, {name}: error {error:.1e}, from sorted {difference:.1e}")
        assert max(error, difference) < 2e-2


if __name__ == "__main__":
    main()
