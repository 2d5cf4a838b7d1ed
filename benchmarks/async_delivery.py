"""Measure the CPU time per token of `AsyncLLM`'s iterators and of an API worker's sinks, without HTTP.

Both get tokens from an engine that only hands them out, and write the events of a stream. One task per request waits
for them. Example with 256 requests of 200 tokens:

    python benchmarks/async_delivery.py 256 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenspeed_bench.result import machine
from tokenspeed_bench.shapes import write
from tokenspeed_server.formats import CompletionFormat, Usage
from tokenspeed_server.parser_chain import ParserChain
from tokenspeed_server.replies import Reply, ReplyOptions

from tokenspeed_core import AsyncLLM, SamplingParams
from tokenspeed_core.engine.async_engine import AsyncEngine
from tokenspeed_core.engine.client import EngineClient
from tokenspeed_core.engine.engine_process import EngineProcess
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.outputs import make_assembler
from tokenspeed_core.engine.requests import NO_OPTIONS
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.text.tokenizer import load_tokenizer

ENGINE = Path(__file__).with_name("api_process.py")
PROMPT = [5, 6, 7]


async def iterate(llm: AsyncLLM, params: SamplingParams) -> int:
    """Write the events of a request from `AsyncLLM`'s deltas, and return their number."""
    num_events = 0
    response_format = CompletionFormat("m", llm.tokenizer, False)
    async for output in llm.generate({"prompt_token_ids": PROMPT}, params, delta=True):
        delta = output.outputs[0]
        response_format.event(0, str(delta.text), delta.finish_reason, {})
        num_events += 1
    return num_events


async def read_reply(engine: AsyncEngine, params: SamplingParams) -> None:
    """Read the events that the sink of an API worker writes."""
    tokenizer = engine.inputs.text.tokenizer
    usage = Usage(len(PROMPT))
    reply = Reply(CompletionFormat("m", tokenizer, False), ReplyOptions(is_stream=True), usage)
    assembler = make_assembler(params, tokenizer)
    choice = reply.add_choice(assembler, ParserChain({}), is_first_of_prompt=True)
    request = engine.request(params, np.array(PROMPT, np.int32), NO_OPTIONS)
    engine.submit(request, [choice])
    while reply.num_open:
        await reply.wait()


async def measure(
    num_requests: int, num_tokens: int, num_rounds: int, step_seconds: float, model: Path
) -> dict[str, float]:
    """Return medians: both times in microseconds per token, and the events of the iterators.

    An iterator that falls behind writes one event for several tokens, and then costs less per token.
    """
    program = Program([sys.executable, str(ENGINE), "--engine"], {"step_seconds": step_seconds})
    process = EngineProcess(program)
    client = EngineClient(process.addresses[0])
    engine = AsyncEngine(client)
    await process.start(client)
    try:
        text = await engine.start(lambda: ModelText(load_tokenizer(model), None))
        engine.open(InputProcessor(text, client.ready.result()))
        llm = AsyncLLM()
        llm._engine, llm.tokenizer = engine, text.tokenizer
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        num_total = num_requests * num_tokens
        rows: list[tuple[float, float, float]] = []
        for _ in range(num_rounds):
            begin = time.process_time()
            counts = await asyncio.gather(*(iterate(llm, params) for _ in range(num_requests)))
            middle = time.process_time()
            await asyncio.gather(*(read_reply(engine, params) for _ in range(num_requests)))
            end = time.process_time()
            each = 1e6 / num_total
            rows.append(((middle - begin) * each, (end - middle) * each, sum(counts) / num_total))
        names = ("iterators_us", "sinks_us", "iterator_events_per_token")
        columns = zip(names, zip(*rows, strict=True), strict=True)
        return {name: round(statistics.median(column), 2) for name, column in columns}
    finally:
        await process.kill()
        engine.close()


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requests", type=int, help="number of concurrent requests")
    parser.add_argument("tokens", type=int, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each path")
    parser.add_argument(
        "--step-ms", type=float, default=6.0, help="milliseconds between engine steps"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write("qwen3-0.6b", Path(folder))
        times = asyncio.run(
            measure(given.requests, given.tokens, given.rounds, given.step_ms / 1e3, model)
        )
    print(json.dumps({**times, "machine": machine()}))


if __name__ == "__main__":
    main()
