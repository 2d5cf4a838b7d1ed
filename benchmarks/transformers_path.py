"""Compare a native family with the same model run through transformers, on dummy weights.

Prints a line of JSON for each path and number of rows, then the ratio of the times. Each path runs in a separate
process. Needs `tokenspeed-models-transformers`. Example:

    python benchmarks/transformers_path.py qwen3-8b --rows 1,64
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenspeed_bench.shapes import write

from tokenspeed_core import LLM, SamplingParams

NUM_PROMPT = 128
PATHS: dict[str, dict[str, Any]] = {
    "native": {},
    "transformers": {"hf_overrides": {"architectures": ["*"]}},
}


def measure(
    shape: str, path: str, rows: list[int], num_tokens: int, repeats: int, flags: dict[str, Any]
) -> None:
    """Print the figures of one path."""
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            str(write(shape, Path(folder))),
            load_format="dummy",
            max_num_seqs=max(rows),
            **PATHS[path],
            **flags,
        ) as llm,
    ):
        start_seconds = time.perf_counter() - begin
        for num_rows in rows:
            seconds = {
                length: best_seconds(llm, num_rows, length, repeats) for length in (1, num_tokens)
            }
            step = (seconds[num_tokens] - seconds[1]) / (num_tokens - 1)
            figures = {
                "ms_per_token": round(1e3 * step, 3),
                "decode_tokens_per_s": round(num_rows / step, 1),
                "first_token_ms": round(1e3 * seconds[1], 2),
                "start_s": round(start_seconds, 1),
            }
            print(
                json.dumps({"shape": shape, "path": path, "rows": num_rows, **figures}), flush=True
            )


def best_seconds(llm: LLM, num_rows: int, num_tokens: int, repeats: int) -> float:
    """Return the shortest time of a batch of requests with different prompts."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [
        {"prompt_token_ids": [10 + (row + at) % 97 for at in range(NUM_PROMPT)]}
        for row in range(num_rows)
    ]
    times = []
    for _ in range(repeats + 1):  # the first is a warm-up
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompts, params)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def main() -> None:
    """Measure both paths and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="a shape of `tokenspeed bench`, such as qwen3-8b")
    parser.add_argument("--rows", default="1,64", help="numbers of concurrent sequences")
    parser.add_argument("--num-tokens", type=int, default=256, help="tokens per sequence")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of a batch; the best one counts"
    )
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="more keyword arguments of LLM, as JSON"
    )
    parser.add_argument("--path", choices=PATHS, help="measure one path in this process")
    options = parser.parse_args()
    rows = [int(each) for each in options.rows.split(",")]
    if options.path is not None:
        measure(
            options.shape, options.path, rows, options.num_tokens, options.repeats, options.flags
        )
        return
    found: dict[tuple[str, int], float] = {}
    for path in PATHS:
        command = [sys.executable, __file__, *sys.argv[1:], "--path", path]
        for line in subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines():
            print(line, flush=True)
            report = json.loads(line)
            found[path, report["rows"]] = report["ms_per_token"]
    for num_rows in rows:
        ratio = found["transformers", num_rows] / found["native", num_rows]
        print(json.dumps({"rows": num_rows, "transformers_over_native": round(ratio, 3)}))


if __name__ == "__main__":
    main()
