"""From the record of a request to a span with the `gen_ai` attributes of OpenTelemetry's conventions.

The conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokenspeed_core.api import RequestRecord

Value = str | int | float | list[str]

_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "n": "choice.count",
}
_NANOSECONDS = 10**9


def export(tracer: Tracer, record: RequestRecord, ended_at: float | None = None) -> None:
    """Make the span of a request that ended. `ended_at` is Unix time in seconds, by default now."""
    end = time.time() if ended_at is None else ended_at
    start = end - record.duration
    span = tracer.start_span(
        f"{record.operation} {record.model}",
        context=_parent(record.traceparent),
        kind=SpanKind.SERVER,
        attributes=attributes(record),
        start_time=int(start * _NANOSECONDS),
    )
    if record.time_to_first_token is not None:
        at = start + record.time_to_first_token
        span.add_event("first token", timestamp=int(at * _NANOSECONDS))
    if record.finish_reason == "error":
        span.set_attribute("error.type", "server_error")
        span.set_status(Status(StatusCode.ERROR, record.error))
    span.end(int(end * _NANOSECONDS))


def attributes(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes of a request."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "tokenspeed",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
    }
    if record.time_to_first_token is not None:
        found["gen_ai.server.time_to_first_token"] = record.time_to_first_token
    for ours, theirs in _PARAMETERS.items():
        value = record.parameters.get(ours)
        if value is not None:
            found[f"gen_ai.request.{theirs}"] = value
    if stops := record.parameters.get("stop"):
        found["gen_ai.request.stop_sequences"] = list(stops)
    if record.client_request_id:
        found["tokenspeed.client_request_id"] = record.client_request_id
    return found


def _parent(traceparent: str) -> Context | None:
    """Return the context of the client's span, if it sent one."""
    if not traceparent:
        return None
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
