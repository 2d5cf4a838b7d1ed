"""Start `tokenspeed serve` on a shape's dummy weights and load it over HTTP; print one JSON line for each load.

    python benchmarks/online.py SHAPE [--fixed] [--loads 1x16,64x512,256x2048] [--flags="--api-workers 2"]

This is for scripts. `tokenspeed bench serve --shape SHAPE` runs the same measurement for people. A load is written as
USERSxREQUESTS. With one user, prompts and outputs have 128 tokens; with several, prompts have 256 and outputs 128.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from tokenspeed_bench import result as results
from tokenspeed_bench.client import LoadOptions
from tokenspeed_bench.connection import Target
from tokenspeed_bench.online import Load, Online, measure
from tokenspeed_bench.server import started
from tokenspeed_bench.shapes import write
from tokenspeed_bench.traffic import load


def main() -> None:
    """Serve, load, report, stop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="shape of `tokenspeed bench`, such as qwen3-8b")
    parser.add_argument("--loads", default="1x16,64x512,256x2048", help="loads to send")
    parser.add_argument(
        "--fixed",
        action="store_true",
        help="use equal lengths; by default they vary by up to 50 %%",
    )
    parser.add_argument("--procs", type=int, default=8, help="number of client processes")
    parser.add_argument("--flags", default="", help="more flags of serve")
    options = parser.parse_args()
    loads = []
    for words in options.loads.split(","):
        users, requests = map(int, words.split("x"))
        lengths = (128, 128) if users == 1 else (256, 128)
        loads.append(
            Load(load(requests, *lengths, options.fixed), LoadOptions(users, None, options.procs))
        )
    result = results.new("serve", options.shape, options.shape, {"flags": options.flags})

    def report(run: dict[str, Any]) -> None:
        shown = {
            name: value
            for name, value in run.items()
            if name not in ("traffic", "figures", "series")
        }
        name = "http" if run["traffic"]["name"] == "load" else run["traffic"]["name"]
        line = {
            "workload": name,
            "label": options.shape,
            **run.get("pace", {}),
            **run["traffic"],
            **run["figures"],
        }
        print(json.dumps(line | shown | {"workload": name}), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = str(write(options.shape, Path(folder)))
        flags = (
            "--load-format",
            "dummy",
            "--log-level-http",
            "warning",
            "--served-model-name",
            "m",
        )
        with started([path, *flags, *shlex.split(options.flags)], None) as (api, seconds):
            print(
                json.dumps(
                    {"workload": "start", "shape": options.shape, "health_s": round(seconds, 2)}
                ),
                flush=True,
            )
            measure(Target(api.url, "m"), Online(loads, salts=True), result, report)


if __name__ == "__main__":
    main()
