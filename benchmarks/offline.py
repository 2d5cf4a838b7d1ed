"""Run the seeded workloads through `LLM` on dummy weights; print one JSON line for each.

    python benchmarks/offline.py SHAPE [--workloads latency,throughput,prefill,agentic] [--repeats 3] [--flags JSON]

The prefix cache is forgotten before every repeat; the best of the repeats is reported, as the compared figures
were. Each line carries the device, versions and the backends that ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import write
from workloads import WORKLOADS, Workload

from tokenspeed_core import LLM, SamplingParams

WARM_UP = ([17] * 64, 8)


def run(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Run a workload's waves one after another; return seconds and token counts."""
    begin = time.perf_counter()
    num_prompt = num_output = num_cached = 0
    for wave in workload:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in wave],
            [SamplingParams(temperature=0, max_tokens=out_len, ignore_eos=True) for _, out_len in wave],
        )
        num_prompt += sum(len(prompt) for prompt, _ in wave)
        num_output += sum(len(output.outputs[0].token_ids) for output in outputs)
        num_cached += sum(output.num_cached_tokens for output in outputs)
    return {
        "s": time.perf_counter() - begin, "prompt_tokens": num_prompt, "output_tokens": num_output,
        "cached_tokens": num_cached,
    }


def best(llm: LLM, workload: Workload, repeats: int) -> dict[str, Any]:
    """Return the fastest of some repeats, each from an empty prefix cache."""
    results = []
    for _ in range(repeats):
        llm.reset_prefix_cache()
        results.append(run(llm, workload))
    result = min(results, key=lambda each: float(each["s"]))
    seconds = result["s"]
    return result | {
        "repeats_s": [round(each["s"], 4) for each in results],
        "out_per_s": round(result["output_tokens"] / seconds, 1),
        "prompt_per_s": round(result["prompt_tokens"] / seconds, 1),
        "ms_per_output": round(1e3 * seconds / result["output_tokens"], 4),
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", type=json.loads, default={}, help="more keywords for LLM, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write(options.shape, Path(folder))
        begin = time.perf_counter()
        llm = LLM(str(path), load_format="dummy", **options.flags)
        started = time.perf_counter() - begin
        facts = {
            "shape": options.shape, "flags": options.flags, "python": platform.python_version(),
            "platform": llm.kernel_plan.platform, "backends": llm.kernel_plan.backends(),
        }
        print(json.dumps({"workload": "start", "s": round(started, 2), **facts}), flush=True)
        llm.generate([{"prompt_token_ids": WARM_UP[0]}], SamplingParams(temperature=0, max_tokens=WARM_UP[1]))
        for name in options.workloads.split(","):
            print(json.dumps({"workload": name, **best(llm, WORKLOADS[name](), options.repeats), **facts}), flush=True)
        llm.shutdown()


if __name__ == "__main__":
    main()
