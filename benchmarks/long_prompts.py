"""Measure the gaps of a stream while another client sends prompts of 256k tokens or gets many log-probabilities.

An API worker serves an engine that hands out a token per step; the tokenizer and the template are the demo's. One
process reads a stream and notes the time between events; another sends the prompts. Prints a line of JSON per case,
with the gaps of the stream and the seconds that one prompt takes. `logprobs` needs no server: it notes the gaps of an
event loop while it waits for a body of 38,400 tokens with 20 alternatives. Example:

    python benchmarks/long_prompts.py --cases quiet,text,chat,turns,tools,too-long,logprobs
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from api_process import HERE as API_PROCESS
from chat_turns import words
from tokenspeed_bench.result import machine
from tokenspeed_demo.score import CHECKPOINT
from tokenspeed_server.formats import Answer, ChatFormat, Usage
from tokenspeed_server.lifecycle import WorkerConfig, serve
from tokenspeed_server.listen import listen, url
from tokenspeed_server.logprobs import AnswerLogprobs
from tokenspeed_server.service import Options
from tokenspeed_server.supervisor import Supervisor

from tokenspeed_core.commands.serving import ModelText
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.text.template import load_chat_template
from tokenspeed_core.text.tokenizer import load_tokenizer

NUM_TOKENS = 262_144
STEP_SECONDS = 0.01
NUM_LOGPROBS = (38_400, 20)
CASES = ("quiet", "text", "chat", "turns", "tools", "too-long", "logprobs")


def be_server() -> int:
    """Run an API worker with an engine that hands out tokens."""
    (bound,) = listen("127.0.0.1", 0, 1)
    print(url(bound), flush=True)
    tokenizer = load_tokenizer(CHECKPOINT)
    template = load_chat_template(CHECKPOINT, tokenizer.special_tokens)
    text = ModelText(tokenizer, template)
    settings = {"step_seconds": STEP_SECONDS, "longest": 2 * NUM_TOKENS, "token": 300}
    engine = Program([sys.executable, str(API_PROCESS), "--engine"], settings)
    config = WorkerConfig(
        bound,
        Options("canned"),
        lambda: text,
        log_level="warning",
        on_ready=lambda text: print("ready", flush=True),
    )
    return serve(config, Supervisor([engine], ()))


def prompts(case: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the routes and bodies of a case."""
    rng, tokenizer = random.Random(7), load_tokenizer(CHECKPOINT)
    sample = words(rng, 50_000)
    num_chars = NUM_TOKENS * len(sample) // len(tokenizer.encode(sample, add_special_tokens=False))
    history: list[dict[str, str]] = []
    while True:
        text = words(rng, num_chars if case != "too-long" else 6_000_000)
        if case in ("text", "too-long"):
            yield "completions", {"prompt": text, "max_tokens": 1}
        elif case == "tools":
            messages = [{"role": "user", "content": "Hello!"}]
            yield "chat/completions", {"messages": messages, "tools": tools(text), "max_tokens": 1}
        elif case == "chat":
            messages = [{"role": "user", "content": text}]
            yield "chat/completions", {"messages": messages, "max_tokens": 1}
        else:
            history.append({"role": "user", "content": text if not history else text[:2000]})
            yield "chat/completions", {"messages": list(history), "max_tokens": 1}
            history.append({"role": "assistant", "content": words(rng, 500)})


def tools(text: str) -> list[dict[str, Any]]:
    """Return 200 tools with parameters that are described by a text."""
    lines = text.split(".")[: 200 * 40]
    properties = [{"type": "string", "description": line} for line in lines]
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "parameters": {
                    "type": "object",
                    "properties": {f"p{j}": each for j, each in enumerate(properties[i::200])},
                },
            },
        }
        for i in range(200)
    ]


def send(base: str, case: str) -> None:
    """Send prompts until the process is killed; print the status and the seconds of each."""
    with httpx.Client(base_url=base, trust_env=False, timeout=120) as client:
        for route, body in prompts(case):
            data = json.dumps(body).encode()
            begin = time.perf_counter()
            headers = {"content-type": "application/json"}
            status = client.post(f"/v1/{route}", content=data, headers=headers).status_code
            print(json.dumps([status, time.perf_counter() - begin]), flush=True)


@contextmanager
def server() -> Iterator[str]:
    """Run the server; yield its URL."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--server"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        base = process.stdout.readline().strip()
        process.stdout.readline()
        yield base
    finally:
        process.terminate()
        process.wait()


def stream_gaps(base: str, num_events: int) -> list[float]:
    """Return the seconds between the events of a stream."""
    body = {"prompt": [5], "max_tokens": num_events, "stream": True, "ignore_eos": True}
    times = []
    with (
        httpx.Client(base_url=base, trust_env=False, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        for _ in response.iter_raw():
            times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def measure(base: str, case: str, num_events: int) -> dict[str, Any]:
    """Return the gaps of a stream, and the observations of a case's sender."""
    command = [sys.executable, __file__, "--send", base, case]
    sender = None
    if case != "quiet":
        sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert sender.stdout is not None
        sender.stdout.readline()  # it is warm, and its first prompt is answered
    gaps = stream_gaps(base, num_events)
    answers: list[list[float]] = []
    if sender is not None:
        sender.terminate()
        answers = [json.loads(line) for line in (sender.communicate()[0] or "").splitlines()]
    seconds = sorted(each[1] for each in answers)
    return {
        "case": case,
        **figures(gaps),
        "num_prompts": len(answers),
        "statuses": sorted({each[0] for each in answers}),
        "prompt_seconds": round(seconds[len(seconds) // 2], 3) if seconds else None,
    }


def figures(gaps: list[float]) -> dict[str, Any]:
    """Return the distribution of gaps in milliseconds."""
    ordered = sorted(gaps)
    at = {"p50": 0.5, "p99": 0.99}
    found = {name: ordered[int(len(ordered) * part)] for name, part in at.items()}
    found["max"] = ordered[-1]
    return {f"gap_{name}_ms": round(1e3 * each, 1) for name, each in found.items()}


async def logprobs_gaps() -> dict[str, Any]:
    """Return the gaps of an event loop while a thread writes a body with log-probabilities."""
    tokenizer, rng = load_tokenizer(CHECKPOINT), random.Random(7)
    num_tokens, width = NUM_LOGPROBS
    found = AnswerLogprobs()
    for _ in range(num_tokens):
        top = [(rng.randrange(500), -2.5) for _ in range(width)]
        found.append(rng.randrange(500), -1.5, top, 0)
    answer = Answer(text="x", deltas=["x"], finish_reason="length", logprobs=found)
    pieces = ChatFormat("canned", tokenizer, wants_usage=False).pieces(
        [answer], Usage(), True, False
    )
    loop, gaps = asyncio.get_running_loop(), []
    with ThreadPoolExecutor() as pool:
        begin = last = time.perf_counter()
        body = loop.run_in_executor(pool, list, pieces)
        while not body.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        seconds = time.perf_counter() - begin
    return {
        "case": "logprobs",
        **figures(gaps),
        "body_bytes": sum(map(len, await body)),
        "body_seconds": round(seconds, 3),
    }


def main() -> int:
    """Run the server, a sender or the measurement, as the arguments say."""
    if sys.argv[1:2] == ["--server"]:
        return be_server()
    if sys.argv[1:2] == ["--send"]:
        send(*sys.argv[2:4])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="cases to run")
    parser.add_argument("--events", type=int, default=500, help="events of the stream per case")
    given = parser.parse_args()
    print(json.dumps({"machine": machine(), "file": Path(__file__).name}))
    for case in given.cases.split(","):
        if case == "logprobs":
            print(json.dumps(asyncio.run(logprobs_gaps())), flush=True)
        else:
            with server() as base:
                print(json.dumps(measure(base, case, given.events)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
