"""Compare TokenSpeed with transformers on the demo model and a CPU, and time a server from start to first token.

Both run the same checkpoint with the same dtype, number of threads and output lengths, and decode greedily. Their runs
alternate, and each figure is a median over pairs of runs. Example:

    python benchmarks/cpu_demo.py --dtype bfloat16 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import transformers

import tokenspeed_core
from tokenspeed_core import LLM, SamplingParams

TARGETS = {"batch 1": 1.2, "batch 16": 1.2, "16 arriving": 5.0}
ARRIVAL_SECONDS = 0.02  # between requests that arrive over time


@dataclass(frozen=True)
class Request:
    """A prompt, the number of tokens to generate, and when it arrives, in seconds."""

    prompt: list[int]
    num_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Figure:
    """Tokens per second of both, and the median of the pairs' ratios."""

    what: str
    ours: float
    theirs: float
    ratio: float


def requests(num: int, num_prompt: int, num_tokens: int, seed: int) -> list[Request]:
    """Return requests of equal lengths with new prompts."""
    random = np.random.default_rng(seed)
    return [
        Request(random.integers(300, 1000, num_prompt).tolist(), num_tokens) for _ in range(num)
    ]


def arriving(num: int, seed: int) -> list[Request]:
    """Return requests of unequal lengths that arrive one after another."""
    random = np.random.default_rng(seed)
    return [
        Request(
            random.integers(300, 1000, int(random.integers(16, 200))).tolist(),
            int(random.integers(32, 256)),
            i * ARRIVAL_SECONDS,
        )
        for i in range(num)
    ]


class Theirs:
    """transformers: `generate` on a batch, or on one request after another."""

    def __init__(self, checkpoint: str, dtype: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype)
        ).eval()
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def batch(self, wanted: Sequence[Request]) -> None:
        """Generate for prompts of equal length together."""
        ids = torch.tensor([request.prompt for request in wanted])
        with torch.inference_mode():
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=wanted[0].num_tokens
            )
        assert made.shape[1] == ids.shape[1] + wanted[0].num_tokens

    def over_time(self, wanted: Sequence[Request]) -> None:
        """Serve requests one after another, none before it arrives."""
        begin = time.perf_counter()
        for request in wanted:
            time.sleep(max(0.0, begin + request.arrival - time.perf_counter()))
            self.batch([request])


class Ours:
    """TokenSpeed in this process, without hits in its prefix cache: every prompt is new."""

    def __init__(self, checkpoint: str, dtype: Literal["bfloat16", "float32"]) -> None:
        self.llm = LLM(checkpoint, dtype=dtype, skip_tokenizer_init=True)

    def batch(self, wanted: Sequence[Request]) -> None:
        """Generate for prompts together."""
        outputs = self.llm.generate(
            [prompt(request) for request in wanted], [params(request) for request in wanted]
        )
        assert all(
            len(o.outputs[0].token_ids) == r.num_tokens
            for o, r in zip(outputs, wanted, strict=True)
        )

    def over_time(self, wanted: Sequence[Request]) -> None:
        """Serve requests as they arrive."""
        engine, waiting, num_tokens = self.llm._engine, list(wanted), 0
        begin = time.perf_counter()
        while waiting or engine.has_work:
            while waiting and begin + waiting[0].arrival <= time.perf_counter():
                request = waiting.pop(0)
                encoded = self.llm._inputs.encode(prompt(request))
                refused = engine.submit(self.llm._build_submit(encoded, params(request)))
                assert refused is None
            if engine.has_work:
                num_tokens += sum(len(outputs.token_ids) for outputs in engine.step())
            else:
                time.sleep(max(0.0, begin + waiting[0].arrival - time.perf_counter()))
        assert num_tokens == sum(request.num_tokens for request in wanted)


def prompt(request: Request) -> dict[str, Any]:
    """Return a request's prompt as LLM takes it."""
    return {"prompt_token_ids": request.prompt}


def params(request: Request) -> SamplingParams:
    """Return a request's sampling parameters."""
    return SamplingParams(temperature=0, max_tokens=request.num_tokens, ignore_eos=True)


def timed(call: Callable[[Sequence[Request]], None], wanted: Sequence[Request]) -> float:
    """Return the tokens per second of a call."""
    begin = time.perf_counter()
    call(wanted)
    return sum(request.num_tokens for request in wanted) / (time.perf_counter() - begin)


def compare(
    what: str,
    ours: Callable[[Sequence[Request]], None],
    theirs: Callable[[Sequence[Request]], None],
    make: Callable[[int], list[Request]],
    num_pairs: int,
) -> Figure:
    """Run both in turn on the same requests, other ones each time; the first pair warms up."""
    pairs = [(timed(ours, make(seed)), timed(theirs, make(seed))) for seed in range(num_pairs + 1)][
        1:
    ]
    return Figure(
        what,
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def seconds_to_first_token(dtype: str) -> float:
    """Start `tokenspeed serve` on the demo and return the seconds until the first text of a chat arrives."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "tokenspeed_core.cli",
            "serve",
            "--port",
            "0",
            "--dtype",
            dtype,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.search(r"at (http://\S+)", process.stdout.readline())
        assert found, "the server did not start"
        body = {
            "model": "demo",
            "stream": True,
            "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        }
        ask = urllib.request.Request(
            f"{found[1]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask) as events:
            next(event for event in events if re.search(rb'"content": ?"[^"]', event))
        return time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def machine() -> str:
    """Return the CPU and the versions that matter, in one line."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenspeed-core": tokenspeed_core.__version__,
    }
    described = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; {described}"


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs per figure")
    parser.add_argument(
        "--starts", type=int, default=3, help="number of server starts to time; 0: none"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="output tokens per request of a batch"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    import tokenspeed_demo

    checkpoint = os.path.join(os.path.dirname(tokenspeed_demo.__file__), "checkpoint")
    ours, theirs = Ours(checkpoint, arguments.dtype), Theirs(checkpoint, arguments.dtype)
    figures = [
        compare(
            f"batch {num}",
            ours.batch,
            theirs.batch,
            partial(requests, num, 64, arguments.tokens),
            arguments.pairs,
        )
        for num in (1, 16)
    ]
    figures.append(
        compare(
            "16 arriving",
            ours.over_time,
            theirs.over_time,
            lambda seed: arriving(16, seed),
            arguments.pairs,
        )
    )
    print(f"{machine()}\n`{' '.join(['python', *sys.argv])}`, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| demo, tokens/s | TokenSpeed | transformers | ratio | target |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for figure in figures:
        print(
            f"| {figure.what} | {figure.ours:,.0f} | {figure.theirs:,.0f} | {figure.ratio:.2f} | "
            f"{TARGETS[figure.what]:.1f} |"
        )
    if arguments.starts:
        starts = [seconds_to_first_token(arguments.dtype) for _ in range(arguments.starts)]
        print(
            f"\nStart of `tokenspeed serve` to first token: {statistics.median(starts):.1f} s (target: under 10)"
        )


if __name__ == "__main__":
    main()
