"""Measurement of `LLM` in process. The prefix cache is reset before every repeat."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tokenspeed_bench import result as results
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.progress import Progress
from tokenspeed_bench.speculation import DraftCounts, entry
from tokenspeed_bench.traffic import END_ID, Traffic, below, load
from tokenspeed_core import BadRequestError, SamplingParams

if TYPE_CHECKING:
    from tokenspeed_core import EngineStats, RequestOutput

FIRST_LEN = 128  # prompt tokens of the requests that time the first token
NUM_FIRST = 9  # of them: one that comes first, and the rest for the median
WARM_UP = ([17] * 64, 8)
END_IDS = (END_ID, 30_000, 1_500, 200)  # tried in turn, until the model takes all ids below

Run = dict[str, Any]


class Engine(Protocol):
    """The methods of `LLM` that the measurement uses."""

    kernel_plan: Any

    def generate(self, prompts: Any, sampling_params: Any = None) -> list[RequestOutput]: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Offline:
    """What to measure: traffics, and the number of repeats."""

    traffics: Sequence[Traffic]
    repeats: int = 3


def measure(
    make: Callable[[], Engine],
    plan: Offline,
    result: dict[str, Any],
    report: Callable[[Run], None],
    trace: Callable[[str, Callable[[], object]], None] | None = None,
) -> list[str]:
    """Create an engine, run everything and add it to `result`.

    Returns messages for skipped traffic and traces. `report` is called with each run. `trace` is
    called with each traffic, by name, to run once more. Ctrl-C keeps the runs measured so far.
    """
    begin = time.perf_counter()
    engine = make()
    seconds = time.perf_counter() - begin
    refused: list[str] = []
    try:
        results.add_plan(result, _plan_of(engine))
        end_id, first = first_tokens(engine)
        report(results.add_run(result, {"name": "start"}, {"s": round(seconds, 2), **first}))
        engine.generate([{"prompt_token_ids": WARM_UP[0]}], _greedy(WARM_UP[1]))
        for traffic in plan.traffics:
            fitting = below(traffic, end_id)
            try:
                _repeat(engine, fitting, plan.repeats, result, report)
            except BadRequestError as error:
                refused.append(
                    f"{traffic.name} was left out: {error}. Shorten it with options such as --input-len."
                )
            else:
                if trace is not None and not result["is_interrupted"]:
                    engine.reset_prefix_cache()
                    try:
                        trace(traffic.name, partial(once, engine, fitting))
                    except BenchError as error:
                        refused.append(f"{traffic.name} has no profile: {error}")
            if result["is_interrupted"]:
                break
    except KeyboardInterrupt:
        result["is_interrupted"] = True
    finally:
        engine.shutdown()
    return refused


def _repeat(
    engine: Engine,
    traffic: Traffic,
    num: int,
    result: dict[str, Any],
    report: Callable[[Run], None],
) -> None:
    """Run a traffic repeatedly and add the run; Ctrl-C reduces the number of repeats."""
    done: list[Mapping[str, Any]] = []
    drafts_before = _drafts(engine)
    with Progress() as progress:
        try:
            for i in range(num):
                progress.say(f"{traffic.name} {i + 1} of {num}")
                engine.reset_prefix_cache()
                done.append(once(engine, traffic))
        except KeyboardInterrupt:
            result["is_interrupted"] = True
    if done:
        seconds = [round(each["s"], 4) for each in done]
        drafts = entry(_drafts(engine).since(drafts_before))
        report(results.add_run(result, traffic.describe(), best(done), repeats_s=seconds, **drafts))


def _drafts(engine: Engine) -> DraftCounts:
    """Return the draft tokens since the engine's start."""
    stats = engine.stats()
    return DraftCounts(
        stats.num_draft_rows,
        stats.num_draft_tokens,
        tuple(stats.num_accepted),
        stats.num_output_tokens,
        tuple(stats.num_drafted),
        stats.is_draft_paused,
    )


def best(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of the fastest repeat."""
    figures = dict(min(repeats, key=lambda each: float(each["s"])))
    seconds = figures["s"]
    return figures | {
        "s": round(seconds, 4),
        "median_s": round(statistics.median(each["s"] for each in repeats), 4),
        "uncached_tokens": figures["prompt_tokens"] - figures["cached_tokens"],
        "out_per_s": round(figures["output_tokens"] / seconds, 1),
        "prompt_per_s": round(figures["prompt_tokens"] / seconds, 1),
        "ms_per_output": round(1e3 * seconds / figures["output_tokens"], 4),
    }


def once(engine: Engine, traffic: Traffic) -> dict[str, Any]:
    """Run the waves one after another; return seconds and token counts."""
    waves = traffic.waves()
    begin = time.perf_counter()
    num_prompt = num_output = num_cached = 0
    for wave in waves:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in wave],
            [_greedy(out_len) for _, out_len in wave],
        )
        num_prompt += sum(len(prompt) for prompt, _ in wave)
        num_output += sum(len(output.outputs[0].token_ids) for output in outputs)
        num_cached += sum(output.num_cached_tokens for output in outputs)
    return {
        "s": time.perf_counter() - begin,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "cached_tokens": num_cached,
    }


def first_tokens(engine: Engine) -> tuple[int, dict[str, float]]:
    """Time the first request after construction and several after it. Also return the end of the usable ids.

    Raises BenchError if the vocabulary is too small.
    """
    prompts = load(NUM_FIRST, FIRST_LEN, 1, is_fixed=True)
    for end_id in END_IDS:
        try:
            seconds = [_first(engine, session.ids) for session in below(prompts, end_id).sessions]
        except BadRequestError as error:
            if error.code == "context_length_exceeded" or error.param not in (
                "prompt",
                "prompt_token_ids",
            ):
                raise BenchError(
                    f"the model does not accept a prompt of {FIRST_LEN} tokens: {error}"
                ) from error
            continue
        median = statistics.median(seconds[1:])
        return end_id, {
            "first_request_ms": round(1e3 * seconds[0], 3),
            "ttft_p50_ms": round(1e3 * median, 3),
            "first_over_median": round(seconds[0] / median, 3),
        }
    raise BenchError(
        f"the model's vocabulary has fewer than {END_IDS[-1]} tokens, too few for this traffic"
    )


def _first(engine: Engine, prompt: list[int]) -> float:
    begin = time.perf_counter()
    engine.generate([{"prompt_token_ids": prompt}], _greedy(1))
    return time.perf_counter() - begin


def _greedy(out_len: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=out_len, ignore_eos=True)


def _plan_of(engine: Engine) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(engine.kernel_plan.to_json())
    return plan
