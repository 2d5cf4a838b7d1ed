"""The hook: a span for each finished request, exported by a thread of the SDK."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from tokenspeed_core.api import RequestRecord, hookimpl

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@cache
def provider() -> TracerProvider | None:
    """Return the provider of this process, made with the first request; None without an endpoint."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tokenspeed"}))
    made = TracerProvider(resource=resource)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


@hookimpl
def observe_request(record: RequestRecord) -> None:
    """Export the span of a request, if an endpoint is set."""
    tracers = provider()
    if tracers is None:
        return
    from tokenspeed_otel.spans import export

    export(tracers.get_tracer("tokenspeed"), record)
