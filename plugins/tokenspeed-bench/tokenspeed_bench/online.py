"""Measurement of a server over HTTP, one load after another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tokenspeed_bench import result as results
from tokenspeed_bench.client import LoadOptions, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.metrics import first_turns_apart, of_records, over_time
from tokenspeed_bench.mock_server import client_cost
from tokenspeed_bench.offline import END_IDS, FIRST_LEN, NUM_FIRST
from tokenspeed_bench.progress import Progress
from tokenspeed_bench.server import Api
from tokenspeed_bench.signals import deferred_interrupts
from tokenspeed_bench.speculation import DraftCounts, counted, read_counts
from tokenspeed_bench.traffic import Traffic, below, load

FIRST_OUT_LEN = 8
MAX_MESSAGES = 3  # different failures to show

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """A traffic and how it is sent."""

    traffic: Traffic
    pace: LoadOptions


@dataclass(frozen=True, slots=True)
class Online:
    """What to measure. `goals` are milliseconds by name. `measures_client` also measures the client.

    With `salts`, every load has a different cache salt, so it starts with an empty prefix cache.
    """

    loads: Sequence[Load]
    goals: Mapping[str, float] = field(default_factory=dict)
    measures_client: bool = True
    salts: bool = False


def measure(
    target: Target, plan: Online, result: dict[str, Any], report_run: Callable[[Run], None]
) -> None:
    """Run every load and add it to `result`; `report_run` is called with each run. Ctrl-C keeps the runs so far.

    Raises BenchError if no request was answered.
    """
    salt = f"bench-{time.time_ns()}" if plan.salts else None
    try:
        with deferred_interrupts() as was_interrupted:
            end_id, first = first_tokens(replace(target, salt=salt))
            report_run(results.add_run(result, {"name": "first"}, first))
            for i, each in enumerate(plan.loads):
                if was_interrupted():
                    break
                salted = replace(target, salt=f"{salt}-{i}") if plan.salts else target
                _send(
                    salted, Load(below(each.traffic, end_id), each.pace), plan, result, report_run
                )
    except KeyboardInterrupt:
        result["is_interrupted"] = True
    else:
        result["is_interrupted"] |= was_interrupted()


def _send(
    target: Target,
    each: Load,
    plan: Online,
    result: dict[str, Any],
    report_run: Callable[[Run], None],
) -> None:
    """Run a load and add its run to `result`. Raises BenchError if no request was answered."""
    pace, name, client = each.pace, each.traffic.name, {}
    num_requests = sum(len(session.turns) for session in each.traffic.sessions)
    drafts_before = _drafts(target)
    with Progress() as progress:
        answers = run(
            target,
            each.traffic.sessions,
            pace,
            lambda done, total: progress.say(
                f"{name}, {pace.users} users: {done} of {total} requests"
            ),
        )
        if not answers.records:
            if answers.is_interrupted:
                return
            raise BenchError(f"no request was answered: {most_common(answers.failures)}")
        is_part = (
            answers.is_interrupted and len(answers.records) + len(answers.failures) < num_requests
        )
        # In a complete load, every request without an answer failed, also those lost with a client process.
        num_failed = len(answers.failures) if is_part else num_requests - len(answers.records)
        figures = of_records(answers.records, plan.goals, num_failed)
        figures |= first_turns_apart(answers.records)
        if plan.measures_client and not answers.is_interrupted:
            progress.say("the client alone")
            with suppress(KeyboardInterrupt):
                client = {"client": client_cost(pace)}
        drafts = counted(partial(_drafts, target), drafts_before, figures["output_tokens"])
    report_run(
        results.add_run(
            result,
            each.traffic.describe(),
            figures,
            pace={"users": pace.users, "rate": pace.rate, "procs": pace.procs},
            goals=dict(plan.goals),
            failures=_different(answers.failures),
            series=over_time(answers.records),
            **client,
            **drafts,
            **({"is_part": True} if is_part else {}),
        )
    )


def first_tokens(target: Target) -> tuple[int, dict[str, float]]:
    """Time the first request of a server and several after it. Also return the end of the usable ids.

    Raises BenchError if it answers none. Ctrl-C raises KeyboardInterrupt.
    """
    prompts = load(NUM_FIRST, FIRST_LEN, FIRST_OUT_LEN, is_fixed=True)
    failures: list[str] = []
    for end_id in END_IDS:
        sessions = below(prompts, end_id).sessions
        answers = run(target, sessions[:1], LoadOptions(1, None, 1))
        if answers.is_interrupted:
            raise KeyboardInterrupt
        if not answers.records:
            failures += answers.failures
            if not answers.failures[0].startswith(("400", "422")):
                break
            continue
        rest = run(target, sessions[1:], LoadOptions(1, None, 1))
        if rest.is_interrupted:
            raise KeyboardInterrupt
        if not rest.records:
            raise BenchError(f"only the first request was answered: {most_common(rest.failures)}")
        first, median = (
            answers.records[0].first(),
            statistics.median(r.first() for r in rest.records),
        )
        return end_id, {
            "first_request_ms": round(1e3 * first, 3),
            "ttft_p50_ms": round(1e3 * median, 3),
            "first_over_median": round(first / median, 3),
        }
    raise BenchError(f"{target.url} does not answer completions of token ids: {failures[-1]}")


def _drafts(target: Target) -> DraftCounts | None:
    """Return the draft tokens that a server has counted, None if it does not show them."""
    page = Api(target.url, target.key).text("/metrics")
    return None if page is None else read_counts(page)


def _different(failures: Sequence[str]) -> dict[str, int]:
    """Count failures by message."""
    return {message: failures.count(message) for message in sorted(set(failures))}


def most_common(failures: Sequence[str]) -> str:
    """Return the most common failures as text."""
    counts = sorted(_different(failures).items(), key=lambda item: -item[1])[:MAX_MESSAGES]
    return "; ".join(
        f"{message} ({count} times)" if count > 1 else message for message, count in counts
    )
