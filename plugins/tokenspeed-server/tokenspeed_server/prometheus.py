"""The metrics in Prometheus's format. Names and units are vLLM's, with the prefix `tokenspeed:`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tokenspeed_core.commands.serving import (
    HOST_BOUNDS,
    REQUEST_BOUNDS,
    STEP_BOUNDS,
    HistogramCounts,
)
from tokenspeed_server.metrics import HISTOGRAMS, OTHER_STATUS, MetricsMemory, merged
from tokenspeed_server.statistics import EngineMonitors, Sample

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_REQUEST_HISTOGRAMS = (
    ("time_to_first_token", "time_to_first_token_seconds", "Time to first token."),
    ("inter_token_latency", "inter_token_latency_seconds", "Time between tokens of a sequence."),
    (
        "time_per_output_token",
        "request_time_per_output_token_seconds",
        "Mean time per output token of a request, without the first.",
    ),
    ("e2e_request_latency", "e2e_request_latency_seconds", "Duration of a request."),
    ("decode_time", "request_decode_time_seconds", "Time from the first token to the last."),
    ("prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    ("generation_tokens", "request_generation_tokens", "Generated tokens of a request."),
)


class Metrics(Collector):
    """Collects the counts of all API workers, and the last report of the engine."""

    def __init__(self, memory: MetricsMemory, monitor: EngineMonitors, model_name: str) -> None:
        """Take the shared memory of the workers, and this worker's view of the engine."""
        self._memory = memory
        self._monitor = monitor
        # The API workers count requests of all engines together.
        engine = "0" if len(monitor.last) == 1 else "all"
        self._labels = {"model_name": model_name, "engine": engine}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> tuple[bytes, str]:
        """Return the page and its content type.

        The format is the classic one whatever a client accepts: in OpenMetrics the library writes the
        colon of names as an underscore.
        """
        encode, content_type = choose_encoder("text/plain")
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Family]:
        """Yield all metrics."""
        yield from self._of_requests()
        families: dict[str, Family] = {}
        for engine, last in enumerate(self._monitor.last):
            if last is None:
                continue
            for family in _Writer({**self._labels, "engine": str(engine)}).of_engine(last):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()

    def _of_requests(self) -> Iterator[Family]:
        rows, writer = self._memory.rows(), _Writer(self._labels)
        for name, shown, text in _REQUEST_HISTOGRAMS:
            yield writer.histogram(shown, text, HISTOGRAMS[name], merged(rows, name))
        reasons: Counter[str] = Counter()
        statuses: Counter[int] = Counter()
        for row in rows:
            reasons.update(row.finish_reasons())
            statuses.update(row.statuses())
        yield writer.counters(
            "request_success", "Finished requests by reason.", "finished_reason", reasons
        )
        yield writer.counters(
            "http_responses",
            "HTTP responses by status, without those to probes.",
            "status",
            {"other" if key == OTHER_STATUS else str(key): n for key, n in statuses.items()},
        )


class _Writer:
    """Writes metrics with the same labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels

    def of_engine(self, last: Sample) -> Iterator[Family]:
        """Yield the metrics of an engine."""
        stats = last.stats
        yield self.gauge("num_requests_running", "Running sequences.", last.num_running)
        yield self.gauge("num_requests_waiting", "Waiting sequences.", last.num_waiting)
        yield self.gauge(
            "kv_cache_usage_perc", "Fraction of KV pages in use, from 0 to 1.", stats.kv_usage
        )
        pages = GaugeMetricFamily(
            "tokenspeed:kv_cache_pages", "KV pages by state.", labels=[*self._labels, "state"]
        )
        for state in ("free", "cached", "held", "pending"):
            number = getattr(stats, f"num_{state}_pages")
            pages.add_metric([*self._labels.values(), state], number)
        yield pages
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", stats.num_prefix_hits),
            ("prompt_tokens", "Prompt tokens, cached ones included.", stats.num_prompt_tokens),
            ("prefill_tokens", "Computed prompt tokens.", stats.num_prefill_tokens),
            ("generation_tokens", "Generated tokens.", stats.num_output_tokens),
            ("num_preemptions", "Preemptions of sequences.", stats.num_preemptions),
            ("engine_steps", "Steps of the engine.", last.num_steps),
            ("spec_decode_num_drafts", "Decodes with draft tokens.", stats.num_draft_rows),
            ("spec_decode_num_draft_tokens", "Draft tokens.", stats.num_draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Accepted draft tokens, each of which saves a decode.",
                stats.num_saved_steps,
            ),
        ):
            family = CounterMetricFamily(f"tokenspeed:{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        yield self.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            "position",
            {str(position): count for position, count in enumerate(stats.num_accepted)},
        )
        yield self.counters(
            "spec_decode_num_draft_tokens_per_pos",
            "Draft tokens by their position in the draft.",
            "position",
            {str(position): count for position, count in enumerate(stats.num_drafted)},
        )
        yield self.gauge(
            "spec_decode_draft_tokens_per_row",
            "Average draft tokens of rows that have any, in the latest step with draft tokens; 0 during a pause.",
            stats.drafts_per_row,
        )
        yield self.gauge(
            "spec_decode_paused", "1 while drafting is paused, else 0.", stats.is_draft_paused
        )
        yield self.gauge(
            "spec_decode_budget_steps",
            "Time that drafting may still lose before it pauses, in steps without draft tokens.",
            stats.draft_budget,
        )
        for name, text, bounds, counts in (
            ("request_queue_time", "Time from arrival to admission.", REQUEST_BOUNDS, stats.queue),
            (
                "request_prefill_time",
                "Time from admission to the first token.",
                REQUEST_BOUNDS,
                stats.prefill,
            ),
            ("step_time", "Duration of a step.", STEP_BOUNDS, stats.step),
            (
                "step_host_time",
                "Time of a step's planning and bookkeeping on the host.",
                HOST_BOUNDS,
                stats.host,
            ),
        ):
            yield self.histogram(f"{name}_seconds", text, bounds, counts)

    def gauge(self, name: str, text: str, value: float) -> Family:
        """Return a gauge."""
        family = GaugeMetricFamily(f"tokenspeed:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Family:
        """Return a counter for each value of a label."""
        labels = [*self._labels, label]
        family = CounterMetricFamily(f"tokenspeed:{name}", text, labels=labels)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], values: HistogramCounts
    ) -> Family:
        """Return a histogram."""
        family = HistogramMetricFamily(f"tokenspeed:{name}", text, labels=list(self._labels))
        buckets, total = [], 0
        for bound, count in zip((*map(repr, bounds), "+Inf"), values.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(self._labels.values()), buckets, values.total)
        return family
