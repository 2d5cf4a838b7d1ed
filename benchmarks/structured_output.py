"""Measure the cost of structured output: on a decode step of the engine, and on the host alone.

    python benchmarks/structured_output.py --shape qwen3-0.6b --rows 64          # on a GPU, with dummy weights
    python benchmarks/structured_output.py --host --rows 64                      # on any CPU, without a model

The vocabulary is made up: as large as the model's, of words, digits, bytes and the pieces of JSON that tokenizers
have. There are two JSON schemas with outputs that do not end: `call` has the arguments of a usual tool call, `hard`
has bounded strings and patterns, whose masks take longer. Every sequence has the same schema, and its own tokens only
if they are drawn (`--draws`, and always with `--host`). Target: less than 5 % at 64 sequences on an H200.

The timeline of a step: the forward of step N+1 is launched, and runs as soon as the sampling of step N is over. Then
the tokens of step N arrive; the host reads them into the grammars, fills the masks of step N+1 and launches its
sampling, then plans and launches the forward of step N+2. All of this overlaps with the forward of step N+1 if it is
shorter; the device additionally copies the masks, masks the logits and chooses again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from tokenspeed_bench.result import machine
from tokenspeed_bench.shapes import SHAPES, write
from tokenspeed_testing.requests import request

from tokenspeed_core.api.grammars import GrammarCompiler, GrammarMatcher, GrammarSpec, Vocabulary
from tokenspeed_core.config import Config
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.factory import discover, resolve, start
from tokenspeed_core.engine.grammars import GrammarBackend, Grammars
from tokenspeed_core.engine.grammars.pool import CompilePool
from tokenspeed_core.engine.messages import Grammar
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hooks import Hooks

NUM_WARM = 32  # steps before the first that counts
VOCAB_SIZE = 151_936
TARGETS = {64: 0.05}


def many(properties: dict[str, Any]) -> str:
    """Return a schema of objects, so many that an output does not end."""
    each = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "minItems": 100_000, "items": each})


SCHEMAS = {
    "call": many(
        {
            "query": {"type": "string"},
            "city": {"type": "string"},
            "max_results": {"type": "integer"},
            "units": {"enum": ["metric", "imperial"]},
            "sort": {"enum": ["date", "price", "distance"]},
            "page": {"type": "integer"},
        }
    ),
    "hard": many(
        {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "at": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        }
    ),
}


class Unchecked:
    """Skips the check of grammars: those of this benchmark are harmless."""

    def check(self, kind: str, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of `size` tokens; the last one ends the output."""
    chance = random.Random(7)
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    pieces = ('"', '":', '": ', '", "', '",', "},", "}, {", '{"', "[{", "]}", ": [", "  ", "\n  ")
    tokens |= dict.fromkeys(piece.encode() for piece in pieces)
    tokens |= dict.fromkeys(str(number).encode() for number in range(1000))
    tokens |= dict.fromkeys(chr(0x4E00 + i).encode() for i in range(20_000))
    syllables = ["".join(pair) for pair in product("bcdfghklmnprstvwz", "aeiou")]
    while len(tokens) < size - 1:
        word = "".join(chance.choices(syllables, k=chance.randint(1, 4)))
        tokens[(chance.choice(("", " ")) + word + chance.choice(("", "n", "s", "r"))).encode()] = (
            None
        )
    end = len(tokens)
    return Vocabulary((*tokens, b"<end>"), frozenset({end}), (end,), lambda text: [*text.encode()])


def backends(catalog: Catalog, names: Sequence[str]) -> Iterator[tuple[str, GrammarBackend]]:
    """Yield the installed grammar backends with these names; all if there are none."""
    for entry in catalog.entries("grammars"):
        if not names or entry.name in names:
            spec = catalog.need(entry, GrammarSpec)
            backend = GrammarBackend(entry, spec, Path(), VOCAB_SIZE, (VOCAB_SIZE - 1,))
            backend._vocabulary = make_vocabulary(VOCAB_SIZE)
            yield entry.name, backend


def in_us(name: str, times: Sequence[float]) -> dict[str, float]:
    """Return the mean and the median of seconds, in microseconds."""
    return {
        f"{name}_mean_us": round(1e6 * statistics.mean(times), 1),
        f"{name}_median_us": round(1e6 * statistics.median(times), 1),
    }


def host_cost(
    compiler: GrammarCompiler, schema: str, num_rows: int, num_steps: int
) -> dict[str, Any]:
    """Return the times of compilation, masks and tokens. Each row chooses its tokens at random."""
    begin = time.perf_counter()
    compiled = compiler.compile("json", schema)
    compile_seconds = time.perf_counter() - begin
    matchers: list[GrammarMatcher] = [compiled.matcher() for _ in range(num_rows)]
    mask = np.zeros((num_rows, -(-VOCAB_SIZE // 32)), np.int32)
    chance = np.random.default_rng(3)
    fills, accepts = [], []
    for _ in range(num_steps):
        begin = time.perf_counter()
        for matcher, row in zip(matchers, mask, strict=True):
            matcher.fill(row)
        fills.append(time.perf_counter() - begin)
        chosen = [
            int(chance.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))))
            for row in mask
        ]
        begin = time.perf_counter()
        assert all(matcher.accept(i) for matcher, i in zip(matchers, chosen, strict=True))
        accepts.append(time.perf_counter() - begin)
    return {
        "compile_ms": round(1e3 * compile_seconds, 1),
        **in_us("masks", fills),
        "masks_p99_us": round(1e6 * sorted(fills)[-max(1, len(fills) // 100)], 1),
        **in_us("tokens", accepts),
    }


class TimedGrammars(Grammars):
    """Grammars that note the time of each mask."""

    seconds: list[float]

    def late(self, plan: Any) -> Any:
        """Return the late inputs and note how long that took."""
        begin = time.perf_counter()
        late = super().late(plan)
        self.seconds.append(time.perf_counter() - begin)
        return late


def serve(
    engine: Engine,
    num_rows: int,
    context: int,
    num_steps: int,
    grammar: Grammar | None,
    draws: bool,
) -> tuple[list[float], int]:
    """Return the seconds of each decode step with so many sequences, and how many of them their grammar ended."""
    for i in range(num_rows):
        asked = request(
            i + 1,
            np.full(context, i + 1, np.int32),
            max_tokens=num_steps + num_rows + 4 * NUM_WARM,
            temperature=float(draws),
            seed=i,
        )
        if grammar is not None:
            asked = replace(
                asked, grammar=grammar, stop_token_ids=np.array([VOCAB_SIZE - 1], np.int32)
            )
        refused = engine.submit(asked)
        assert refused is None, refused
    scheduler = engine.scheduler
    num_ended = 0
    while scheduler.sequences.num_running < num_rows - num_ended or len(
        scheduler.columns.prefilling()
    ):
        engine.step()
        num_ended += len(engine.take_rejected())
    for _ in range(NUM_WARM):
        engine.step()
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        for outputs in engine.step():
            pack(outputs)
        times.append(time.perf_counter() - begin)
    num_ended += len(engine.take_rejected())
    engine.abort(range(1, num_rows + 1))
    while engine.has_work:
        engine.step()
    return times, num_ended


def engine_cost(
    engine: Engine,
    backend: GrammarBackend,
    schema: str,
    arguments: argparse.Namespace,
    num_rows: int,
) -> dict[str, Any]:
    """Return the step without and with grammars. Runs alternate, so that both see the same clock speed."""
    pool = CompilePool(backend.compiler, Unchecked, VOCAB_SIZE)
    mask = engine.runner.mask_buffer()  # type: ignore[attr-defined]
    grammars = TimedGrammars(engine.scheduler, backend, pool, mask)
    grammars.seconds = []
    structured = Engine(engine.scheduler, engine.runner, grammars=grammars)
    plain: list[float] = []
    masked: list[float] = []
    num_ended = 0
    for _ in range(arguments.repeats):
        common = (num_rows, arguments.context, arguments.steps)
        plain += serve(structured, *common, None, arguments.draws)[0]
        times, ended = serve(structured, *common, Grammar("json", schema), arguments.draws)
        masked += times
        num_ended += ended
    grammars.close()
    return {
        "draws": arguments.draws,
        **in_us("step", plain),
        **in_us("structured_step", masked),
        "cost_mean": round(statistics.mean(masked) / statistics.mean(plain) - 1, 4),
        "cost_median": round(statistics.median(masked) / statistics.median(plain) - 1, 4),
        "target": TARGETS.get(num_rows),
        **in_us("mask_wait", grammars.seconds),
        "ended_by_grammar": num_ended,
    }


def main() -> None:
    """Measure every number of rows with every backend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="shape of the dummy weights"
    )
    parser.add_argument(
        "--backends", nargs="*", default=[], help="grammar backends (default: all installed)"
    )
    parser.add_argument(
        "--schemas",
        nargs="*",
        choices=sorted(SCHEMAS),
        default=sorted(SCHEMAS),
        help="schemas to measure",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="numbers of sequences")
    parser.add_argument("--context", type=int, default=256, help="prompt tokens per sequence")
    parser.add_argument("--steps", type=int, default=300, help="decode steps per run")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs")
    parser.add_argument("--draws", action="store_true", help="sample at temperature 1")
    parser.add_argument(
        "--host", action="store_true", help="measure the host alone, without a model"
    )
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="more keyword arguments of LLM, as JSON"
    )
    arguments = parser.parse_args()
    catalog = discover(Config.from_keywords())
    print(json.dumps({"machine": machine()}), flush=True)
    for name, backend in backends(catalog, arguments.backends):
        begin = time.perf_counter()
        compiler = backend.compiler()
        index_seconds = round(time.perf_counter() - begin, 2)
        for schema, num_rows in product(arguments.schemas, arguments.rows):
            cost = host_cost(compiler, SCHEMAS[schema], num_rows, min(100, arguments.steps))
            line = {"backend": name, "schema": schema, "rows": num_rows, "index_s": index_seconds}
            print(json.dumps(line | cost), flush=True)
    if arguments.host:
        return
    with tempfile.TemporaryDirectory() as folder:
        made = {"model": str(write(arguments.shape, Path(folder))), "load_format": "dummy"}
        config = Config.from_keywords(**made, grammar_backend="none", **arguments.flags)
        started = start(
            resolve(config, catalog), catalog, Hooks.load(catalog), lambda what, done, total: None
        )
    for name, backend in backends(catalog, arguments.backends):
        backend.compiler()
        for schema, num_rows in product(arguments.schemas, arguments.rows):
            cost = engine_cost(started.engine, backend, SCHEMAS[schema], arguments, num_rows)
            line = {"backend": name, "schema": schema, "rows": num_rows}
            print(json.dumps(line | cost), flush=True)
    started.engine.close()


if __name__ == "__main__":
    main()
