"""The engine's numbers over the last seconds: the JSON of /v1/stats, and the statistics line of the log."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tokenspeed_core.commands.serving import EngineStats, Heartbeat, HistogramCounts, log_fields

WINDOW_SECONDS = 10.0  # of the rates in /v1/stats

log = logging.getLogger("tokenspeed.statistics")


@dataclass(frozen=True, slots=True)
class Sample:
    """A heartbeat with statistics, and when it arrived on the monotonic clock."""

    at: float
    num_steps: int
    num_running: int
    num_waiting: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Rates:
    """The work of the engine between two samples. Means are None without a step or a lookup."""

    seconds: float
    num_steps: int
    prompt_tokens_per_s: float  # computed prompt tokens, without cached ones
    output_tokens_per_s: float
    step_seconds: float | None  # mean time of a step
    host_seconds: float | None  # of it, planning and bookkeeping of the host
    prefix_hit_rate: float | None  # of the prompt tokens that were looked up
    num_preemptions: int

    @classmethod
    def between(cls, first: Sample, last: Sample) -> Rates:
        """Return the rates from one sample to a later one."""
        seconds = max(1e-9, last.at - first.at)
        old, new = first.stats, last.stats
        num_queries = new.num_prefix_queries - old.num_prefix_queries
        num_hits = new.num_prefix_hits - old.num_prefix_hits
        return cls(
            seconds=seconds,
            num_steps=last.num_steps - first.num_steps,
            prompt_tokens_per_s=(new.num_prefill_tokens - old.num_prefill_tokens) / seconds,
            output_tokens_per_s=(new.num_output_tokens - old.num_output_tokens) / seconds,
            step_seconds=_mean(old.step, new.step),
            host_seconds=_mean(old.host, new.host),
            prefix_hit_rate=num_hits / num_queries if num_queries else None,
            num_preemptions=new.num_preemptions - old.num_preemptions,
        )


def _mean(old: HistogramCounts, new: HistogramCounts) -> float | None:
    count = sum(new.counts) - sum(old.counts)
    return (new.total - old.total) / count if count else None


class EngineMonitor:
    """Keeps an engine's heartbeats of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque()

    @property
    def window(self) -> tuple[Sample, Sample] | None:
        """The oldest and the newest sample."""
        return (self._samples[0], self._samples[-1]) if self._samples else None

    def add(self, heartbeat: Heartbeat) -> None:
        """Keep a heartbeat, and forget those that left the window."""
        if heartbeat.stats is None:
            return
        now = self._clock()
        running, waiting = heartbeat.num_running, heartbeat.num_waiting
        sample = Sample(now, heartbeat.num_steps, running, waiting, heartbeat.stats)
        if self._samples and heartbeat.num_steps < self._samples[-1].num_steps:
            self._samples.clear()  # the engine was restarted
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget all heartbeats."""
        self._samples.clear()


class EngineMonitors:
    """The monitors of all engines, and the numbers of the engines together."""

    def __init__(self, num_engines: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._monitors = [EngineMonitor(clock) for _ in range(num_engines)]
        self._statistics_log: StatisticsLog | None = None

    @property
    def last(self) -> list[Sample | None]:
        """The newest sample of each engine."""
        return [each.window and each.window[1] for each in self._monitors]

    def log_every(self, seconds: float) -> None:
        """Log a line every so many seconds while requests run."""
        self._statistics_log = StatisticsLog(seconds)

    def add(self, engine: int, heartbeat: Heartbeat) -> None:
        """Keep a heartbeat of an engine."""
        self._monitors[engine].add(heartbeat)
        if self._statistics_log is not None and heartbeat.stats is not None:
            self._statistics_log.add(total([each for each in self.last if each is not None]))

    def forget(self, engine: int) -> None:
        """Drop the numbers of an engine that died. Those of its successor start at 0."""
        self._monitors[engine].clear()
        if self._statistics_log is not None:
            self._statistics_log.begin_again()

    def as_json(self) -> dict[str, Any]:
        """Return the state and the rates for a dashboard, or an empty object without a live engine's heartbeat.

        The shape is documented at the route, `GET /v1/stats`.
        """
        windows = [each.window for each in self._monitors]
        known = [window for window in windows if window is not None]
        if not known:
            return {}
        numbers = _as_json(total([first for first, _ in known]), total([last for _, last in known]))
        if len(windows) == 1:
            return numbers
        return {**numbers, "replicas": [window and _as_json(*window) for window in windows]}


def total(samples: Sequence[Sample]) -> Sample:
    """Return the sums of the samples of several engines, at the mean of their times."""
    if len(samples) == 1:
        return samples[0]
    return Sample(
        at=sum(each.at for each in samples) / len(samples),
        num_steps=sum(each.num_steps for each in samples),
        num_running=sum(each.num_running for each in samples),
        num_waiting=sum(each.num_waiting for each in samples),
        stats=EngineStats(
            *(
                _sum([getattr(each.stats, name) for each in samples])
                for name in EngineStats.__struct_fields__
            )
        ),
    )


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip_longest(*values, fillvalue=0)))
    if not isinstance(values[0], HistogramCounts):
        return sum(values)
    counts = tuple(map(sum, zip(*(each.counts for each in values), strict=True)))
    return HistogramCounts(counts, sum(each.total for each in values))


def _as_json(first: Sample, last: Sample) -> dict[str, Any]:
    stats, rates = last.stats, Rates.between(first, last)
    return {
        "requests": {"running": last.num_running, "waiting": last.num_waiting},
        "kv_cache": {
            "usage": stats.kv_usage,
            "pages": {
                "free": stats.num_free_pages,
                "cached": stats.num_cached_pages,
                "held": stats.num_held_pages,
                "pending": stats.num_pending_pages,
            },
        },
        "totals": {
            "steps": last.num_steps,
            "preemptions": stats.num_preemptions,
            "prompt_tokens": stats.num_prompt_tokens,
            "prefill_tokens": stats.num_prefill_tokens,
            "output_tokens": stats.num_output_tokens,
            "prefix_cache_queries": stats.num_prefix_queries,
            "prefix_cache_hits": stats.num_prefix_hits,
        },
        "window": {
            "seconds": rates.seconds,
            "steps": rates.num_steps,
            "prompt_tokens_per_s": rates.prompt_tokens_per_s,
            "output_tokens_per_s": rates.output_tokens_per_s,
            "step_seconds": rates.step_seconds,
            "host_seconds": rates.host_seconds,
            "prefix_hit_rate": rates.prefix_hit_rate,
            "preemptions": rates.num_preemptions,
        },
    }


class StatisticsLog:
    """Logs one line per interval while requests run, and nothing while the engine is idle."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: Sample | None = None  # the start of the interval; None while idle

    def begin_again(self) -> None:
        """Begin a new interval with the next sample, because its sums are those of other engines."""
        self._since = None

    def add(self, sample: Sample) -> None:
        """Take the newest sample, and log if the interval is over."""
        if not sample.num_running + sample.num_waiting:
            self._since = None
        elif self._since is None:
            self._since = sample
        elif sample.at - self._since.at >= self._seconds:
            _log_line(sample, Rates.between(self._since, sample))
            self._since = sample


def _log_line(sample: Sample, rates: Rates) -> None:
    step, host = rates.step_seconds, rates.host_seconds
    hits = rates.prefix_hit_rate
    log.info(
        "%d running, %d waiting; %.0f output and %.0f prompt tokens/s; KV cache %.1f %%%s%s%s",
        sample.num_running,
        sample.num_waiting,
        rates.output_tokens_per_s,
        rates.prompt_tokens_per_s,
        100 * sample.stats.kv_usage,
        "" if hits is None else f"; prefix hits {100 * hits:.0f} %",
        "" if step is None else f"; step {step * 1e3:.2f} ms (host {(host or 0) * 1e3:.2f} ms)",
        f"; {rates.num_preemptions} preemptions" if rates.num_preemptions else "",
        extra=log_fields(
            running=sample.num_running,
            waiting=sample.num_waiting,
            kv_usage=sample.stats.kv_usage,
            output_tokens_per_s=rates.output_tokens_per_s,
            prompt_tokens_per_s=rates.prompt_tokens_per_s,
            prefix_hit_rate=hits,
            step_seconds=step,
            host_seconds=host,
            preemptions=rates.num_preemptions,
        ),
    )
