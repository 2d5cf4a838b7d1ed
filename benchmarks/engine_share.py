"""Measure the share of a decode step in which the engine's thread works: plan, launch, copy, `prepare`, apply, message.

    python benchmarks/engine_share.py --shape qwen3-0.6b --rows 1 64 256

During the rest of the step it waits for the device's tokens. If the share is below 1, the device limits the speed, and
the thread has time left for new requests. Target: below 0.6 with 1 sequence of qwen3-0.6b on an H200.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenspeed_bench.shapes import SHAPES, write
from tokenspeed_testing.explain import backends
from tokenspeed_testing.requests import request

from tokenspeed_core.config import Config
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.factory import discover, resolve, start
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.worker import transfer

NUM_WARM = 64  # steps before the first that counts
TARGETS = {1: 0.6}


class Waits:
    """Counts the seconds that fetches wait for the device."""

    def __init__(self) -> None:
        """Wrap the function that a fetch returns."""
        self.seconds = 0.0
        self._fetch = transfer._wait
        transfer._wait = self._wait

    def _wait(self, event: Any, parts: Any) -> Any:
        begin = time.perf_counter()
        event.synchronize()
        self.seconds += time.perf_counter() - begin
        return self._fetch(event, parts)


def measure(
    engine: Engine, num_rows: int, context: int, num_steps: int, waits: Waits
) -> dict[str, Any]:
    """Return the mean step of decoding sequences, and the part in which the thread works, in microseconds."""
    for i in range(num_rows):
        # A unique prompt, so that no prefix is shared, and no stop token.
        prompt = np.full(context, i + 1, np.int32)
        max_tokens = num_steps + num_rows + 4 * NUM_WARM
        refused = engine.submit(request(i + 1, prompt, max_tokens=max_tokens))
        assert refused is None, refused
    while engine.scheduler.sequences.num_running < num_rows or len(
        engine.scheduler.columns.prefilling()
    ):
        engine.step()
    for _ in range(NUM_WARM):
        engine.step()
    begin, waited = time.perf_counter(), waits.seconds
    for _ in range(num_steps):
        for outputs in engine.step():
            pack(outputs)
    step = (time.perf_counter() - begin) / num_steps
    works = step - (waits.seconds - waited) / num_steps
    engine.abort(range(1, num_rows + 1))
    while engine.has_work:
        engine.step()
    return {
        "rows": num_rows,
        "context": context,
        "step_us": round(1e6 * step, 1),
        "engine_us": round(1e6 * works, 1),
        "share": round(works / step, 3),
        "target": TARGETS.get(num_rows),
    }


def main() -> None:
    """Measure every number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        help="use dummy weights of a known model; default: the demo",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 64, 256], help="numbers of sequences"
    )
    parser.add_argument("--context", type=int, default=512, help="prompt tokens per sequence")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps to measure")
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="more keyword arguments of LLM, as JSON"
    )
    arguments = parser.parse_args()
    waits = Waits()
    with tempfile.TemporaryDirectory() as folder:
        shape = arguments.shape
        made = {"model": str(write(shape, Path(folder))), "load_format": "dummy"} if shape else {}
        config = Config.from_keywords(**made, **arguments.flags)
        catalog = discover(config)
        started = start(
            resolve(config, catalog), catalog, Hooks.load(catalog), lambda what, done, total: None
        )
    print(
        json.dumps(
            {"platform": started.kernel_plan.platform, "backends": backends(started.kernel_plan)}
        ),
        flush=True,
    )
    for num_rows in arguments.rows:
        print(
            json.dumps(
                measure(started.engine, num_rows, arguments.context, arguments.steps, waits)
            ),
            flush=True,
        )
    started.engine.close()


if __name__ == "__main__":
    main()
