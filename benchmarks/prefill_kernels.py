"""List the kernels of a prefill with their times: trace the `prefill` workload through `LLM` with dummy weights.

    python benchmarks/prefill_kernels.py qwen3-8b

Prints prompt tokens per second without the profiler, then milliseconds, share and calls of each kernel, and the idle
time of the device in between. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenspeed_bench.shapes import SHAPES, write
from tokenspeed_bench.traffic import prefill
from torch.profiler import ProfilerActivity, profile

from tokenspeed_core import LLM, SamplingParams


def seconds(llm: LLM, num_prompts: int) -> float:
    """Serve prompts of 4,096 tokens with an empty prefix cache; return the seconds."""
    (wave,) = prefill(num_prompts)
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in wave],
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    )
    return time.perf_counter() - begin


def report(events: list[Any], most: int, num_layers: int = 0) -> None:
    """Print the kernels with the most time between the first start and the last end.

    Also prints their µs per layer, if the events are those of a number of layers.
    """
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    idle, end = 0.0, spans[0][0]
    for start, stop, name in spans:
        total[name] += stop - start
        count[name] += 1
        idle += max(0.0, start - end)
        end = max(end, stop)
    window = end - spans[0][0]
    for name, us in total.most_common(most):
        per_layer = f"{us / num_layers:8.1f} us/layer " if num_layers else ""
        print(
            f"{us / 1e3:9.2f} ms {us / window:6.1%} {per_layer}{count[name]:6d} x {us / count[name]:9.1f} us  "
            f"{name[:100]}"
        )
    print(f"{window / 1e3:9.2f} ms in total, {idle / 1e3:.2f} ms idle")


def report_layer(events: list[Any], num_layers: int) -> None:
    """Print the kernels of one layer in order, each with its time and the idle time before it, in µs.

    `num_layers` is the number of layers in the events. The layer is one in the middle, between two launches of the
    kernel with the most time among those that most layers run once.
    """
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for start, stop, name in spans:
        total[name] += stop - start
        count[name] += 1
    once = [name for name in total if 0.9 * num_layers <= count[name] <= num_layers]
    if not once:
        return
    first_name = max(once, key=lambda name: total[name])
    places = [place for place, span in enumerate(spans) if span[2] == first_name]
    first, last = places[len(places) // 2 : len(places) // 2 + 2]
    end = spans[first][0]
    print(f"a layer of {spans[last][0] - end:.1f} us, from {first_name[:60]} on:")
    for start, stop, name in spans[first:last]:
        print(f"  idle {start - end:6.1f}  runs {stop - start:8.1f}  {name[:100]}")
        end = max(end, stop)


def main() -> None:
    """Parse arguments, time, trace and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument(
        "--prompts", type=int, default=64, help="prompts of the run without the profiler"
    )
    parser.add_argument("--traced-prompts", type=int, default=12, help="prompts of the traced run")
    parser.add_argument("--kernels", type=int, default=20, help="number of kernels to list")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write(options.shape, Path(folder))), load_format="dummy")
        seconds(llm, 2)
        for _ in range(2):
            print(
                f"{options.prompts * 4096 / seconds(llm, options.prompts):.0f} prompt tokens/s",
                flush=True,
            )
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            seconds(llm, options.traced_prompts)
        report(
            [event for event in trace.events() if "CUDA" in str(event.device_type)], options.kernels
        )
        llm.shutdown()


if __name__ == "__main__":
    main()
