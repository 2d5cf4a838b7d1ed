"""Measure decode steps of the runner on dummy weights: step time, the host's part of it, and the device's gaps.

    python benchmarks/runner_step.py qwen3-0.6b --rows 1 64 256 --context 512 --chunk 128 512
    python benchmarks/runner_step.py qwen3-0.6b --rows 1 64 --chunk 8 --prompts 1 16 17 64
    python benchmarks/runner_step.py deepseek-v2-lite --rows 256 --context 640 --prefill 4096 4096 --trace --kernels 30 --layer --start

Each line of output is JSON, except for those of `--trace` and `--start`. `step_ms` is the time of a step with two in
flight, as in serving; `sync_ms` is the time of a step that runs alone; `host_us` is the time of the launching calls;
`floor_ms` is the lower bound: the bytes that a step must read (weights once, each row's keys and values once) over
`--bandwidth`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prefill_kernels import report, report_layer
from start_phases import StartPhases
from tokenspeed_bench.shapes import SHAPES
from tokenspeed_testing.explain import backends
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner, build


def start(arguments: argparse.Namespace, phases: StartPhases) -> LocalRunner:
    """Build a runner for a config.json with random weights."""
    shape = arguments.shape
    own = SHAPES[shape] if shape in SHAPES else json.loads(Path(shape).read_text())
    catalog = Catalog.discover()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(own))
        resolved = resolve(
            Config.from_keywords(
                model=folder,
                dtype=arguments.dtype or "auto",
                device=arguments.device,
                load_format="dummy",
                max_num_seqs=max(arguments.rows) + max(arguments.prompts),
                chunked_prefill_size=8192,
                block_size=arguments.block_size,
                enforce_eager=arguments.eager,
                cudagraph_capture_sizes=None if arguments.start else tuple(arguments.rows),
                max_total_tokens=None if arguments.start else _pool_tokens(arguments),
            ),
            catalog,
        )
    limits = replace(resolved.limits, max_model_len=min(8192, resolved.limits.max_model_len))
    phases.begin("kernels and model")
    return build(replace(resolved, limits=limits), catalog, phases.progress)


def _pool_tokens(arguments: argparse.Namespace) -> int:
    """Return a pool for all rows with all their steps, and for the prompts mixed in."""
    kinds = [(chunk, prompts) for chunk in arguments.chunk for prompts in arguments.prompts]
    each: int = arguments.context + arguments.steps * (4 + len(kinds)) + 64
    rest = 2 * (arguments.block_size or 16)  # of a prompt's last block, and the token that it gives
    mixed: int = (arguments.steps + 12) * sum((chunk + rest) * prompts for chunk, prompts in kinds)
    return int(max(arguments.rows)) * each + mixed


def prefilled(
    runner: LocalRunner, num_rows: int, context: int, temperature: float
) -> tuple[PlanMaker, list[str]]:
    """Give sequences of `context` tokens to the runner, in chunks of 8192 tokens."""
    runner.forget()
    maker = PlanMaker(runner.block_size)
    names = [f"s{i}" for i in range(num_rows)]
    for slot, name in enumerate(names):
        maker.add(
            name,
            [(slot * 31 + i * 7) % 1000 for i in range(context)],
            slot,
            temperature=temperature,
            seed=slot,
        )
    each = max(1, 8192 // context)
    for first in range(0, num_rows, each):
        maker.step(runner, chunks=dict.fromkeys(names[first : first + each], context))
    return maker, names


def decode(
    runner: LocalRunner,
    maker: PlanMaker,
    names: list[str],
    steps: int,
    in_flight: int,
    chunk: int = 0,
    prompts: int = 1,
) -> dict[str, float]:
    """Run decode steps, each mixed with new prompts of `chunk` tokens; return the mean step and the median launch."""
    plans = []
    for index in range(steps):
        chunks = {f"chunk{index}.{place}": chunk for place in range(prompts if chunk else 0)}
        for place, name in enumerate(chunks):
            maker.add(name, [(index + place) % 1000] * chunk, len(names) + place)
        plans.append(maker.plan(names, chunks or None))
    flying: list[StepPlan] = []
    host: list[float] = []
    begin = time.perf_counter()
    for plan in plans:
        launch = time.perf_counter()
        runner.forward(plan)
        runner.sample(plan.step_id, None)
        host.append(time.perf_counter() - launch)
        flying.append(plan)
        if len(flying) >= in_flight:
            runner.collect(flying.pop(0).step_id)
    for plan in flying:
        runner.collect(plan.step_id)
    total = time.perf_counter() - begin
    return {"ms": 1e3 * total / steps, "host_us": 1e6 * statistics.median(host)}


def prefill(runner: LocalRunner, lengths: list[int], steps: int) -> dict[str, float]:
    """Run steps of new prompts of these lengths, two in flight; return their mean time."""
    runner.forget()
    maker = PlanMaker(runner.block_size)
    for index in range(steps):
        for place, length in enumerate(lengths):
            prompt = [(index * 31 + place * 17 + i * 7) % 1000 for i in range(length)]
            maker.add(f"prompt{index}.{place}", prompt, place)
    plans = [
        maker.plan((), {f"prompt{index}.{place}": n for place, n in enumerate(lengths)})
        for index in range(steps)
    ]
    flying: list[StepPlan] = []
    begin = time.perf_counter()
    for plan in plans:
        runner.forward(plan)
        runner.sample(plan.step_id, None)
        flying.append(plan)
        if len(flying) == 2:
            runner.collect(flying.pop(0).step_id)
    for plan in flying:
        runner.collect(plan.step_id)
    total = time.perf_counter() - begin
    return {"step_ms": 1e3 * total / steps, "tokens_per_s": steps * sum(lengths) / total}


def device_share(
    run: Callable[[int], object], steps: int, num_layers: int, most: int, is_layer_shown: bool
) -> dict[str, float]:
    """Trace `run(steps)`; return how much of the time between first and last kernel the device was busy.

    Prints where that time went, by kernel, for up to `most` of them, and the kernels of a layer in order.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run(steps)
    events = [event for event in trace.events() if "CUDA" in str(event.device_type)]
    if most:
        report(events, most, steps * num_layers)
    if is_layer_shown:
        report_layer(events, steps * num_layers)
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {"busy": busy / (end - spans[0][0]), "kernels": len(spans) / steps}


def main() -> None:
    """Measure every number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help=f"one of {', '.join(SHAPES)}, or a config.json")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 64, 256], help="numbers of sequences"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens per sequence at the start")
    parser.add_argument("--steps", type=int, default=50, help="decode steps to measure")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="0: greedy")
    parser.add_argument(
        "--chunk", type=int, nargs="*", default=[], help="also mix in prompts of these lengths"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[1], help="number of such prompts in each step"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=4.5e12, help="bytes per second, for the floor"
    )
    parser.add_argument("--block-size", type=int, help="as for serve")
    parser.add_argument("--device", default="auto", help="as for serve")
    parser.add_argument("--dtype", help="as for serve")
    parser.add_argument("--eager", action="store_true", help="use no CUDA graphs")
    parser.add_argument(
        "--trace", action="store_true", help="also measure the device's idle time with the profiler"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="with --trace: how many kernels to list"
    )
    parser.add_argument(
        "--layer", action="store_true", help="with --trace: list the kernels of a layer in order"
    )
    parser.add_argument(
        "--prefill",
        type=int,
        nargs="*",
        default=[],
        help="also run steps of prompts of these lengths",
    )
    parser.add_argument(
        "--start", action="store_true", help="start as `LLM` does, and print the phases"
    )
    parser.add_argument(
        "--switch-interval", type=float, help="seconds after which a thread must release the GIL"
    )
    arguments = parser.parse_args()
    if arguments.switch_interval is not None:
        sys.setswitchinterval(arguments.switch_interval)
    phases = StartPhases()
    phases.begin("config")
    runner = start(arguments, phases)
    phases.end()
    plan = runner.kernel_plan
    if arguments.start:
        phases.report()
    print(
        json.dumps(
            {
                "start_s": round(phases.seconds, 1),
                "device": plan.platform,
                "dtype": runner.resolved.config.dtype,
                "block_size": runner.block_size,
                "num_pages": runner.num_pages,
                "backends": backends(plan),
            }
        ),
        flush=True,
    )
    for num_rows in arguments.rows:
        for temperature in arguments.temperature:
            print(json.dumps(measure(runner, arguments, num_rows, temperature)), flush=True)
    if arguments.prefill:
        prefill(runner, arguments.prefill, 2)
        found = prefill(runner, arguments.prefill, 8)
        rounded = {key: round(value, 2) for key, value in found.items()}
        print(json.dumps({"prefill": arguments.prefill, **rounded}), flush=True)
    trace = partial(
        device_share,
        num_layers=runner.resolved.checkpoint.info.num_layers,
        most=arguments.kernels,
        is_layer_shown=arguments.layer,
    )
    if arguments.trace and arguments.prefill:
        share = trace(partial(prefill, runner, arguments.prefill), 3)
        rounded = {key: round(value, 3) for key, value in share.items()}
        print(json.dumps({"prefill": arguments.prefill, **rounded}), flush=True)
    for num_rows in (
        arguments.rows if arguments.trace else ()
    ):  # last: tracing slows all launches after it
        maker, names = prefilled(runner, num_rows, arguments.context, 0.0)
        decode(runner, maker, names, 5, 1)
        for chunk in (0, *arguments.chunk):
            run = partial(decode, runner, maker, names, in_flight=2, chunk=chunk)
            share = trace(run, 10)
            rounded = {key: round(value, 3) for key, value in share.items()}
            print(json.dumps({"rows": num_rows, "chunk": chunk, **rounded}), flush=True)


def measure(
    runner: LocalRunner, arguments: argparse.Namespace, num_rows: int, temperature: float
) -> dict[str, Any]:
    """Measure one number of rows."""
    maker, names = prefilled(runner, num_rows, arguments.context, temperature)
    decode(runner, maker, names, 5, 1)
    alone = decode(runner, maker, names, arguments.steps, 1)
    both = decode(runner, maker, names, arguments.steps, 2)
    resolved = runner.resolved
    weights = resolved.checkpoint.info.num_parameters * (
        4 if resolved.config.dtype == "float32" else 2
    )
    past = (
        num_rows * arguments.context * sum(group.bytes_per_token for group in runner.layout.groups)
    )
    return {
        "rows": num_rows,
        "temperature": temperature,
        "context": arguments.context,
        "step_ms": round(both["ms"], 3),
        "sync_ms": round(alone["ms"], 3),
        "host_us": round(both["host_us"], 1),
        "tokens_per_s": round(num_rows / both["ms"] * 1e3),
        "floor_ms": round(1e3 * (weights + past) / arguments.bandwidth, 3),
        **{
            f"chunk_{chunk}" if prompts == 1 else f"chunk_{prompts}x{chunk}": _mixed(
                runner, maker, names, arguments.steps, chunk, prompts
            )
            for chunk in arguments.chunk
            for prompts in arguments.prompts
        },
    }


def _mixed(
    runner: LocalRunner, maker: PlanMaker, names: list[str], steps: int, chunk: int, prompts: int
) -> dict[str, float]:
    decode(runner, maker, names, 2, 1, chunk, prompts)
    found = decode(runner, maker, names, steps, 2, chunk, prompts)
    return {"step_ms": round(found["ms"], 3), "host_us": round(found["host_us"], 1)}


if __name__ == "__main__":
    main()
