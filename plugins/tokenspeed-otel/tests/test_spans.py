"""The spans that an exporter receives."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tokenspeed_otel import hooks
from tokenspeed_otel.spans import export

from tokenspeed_core.api import RequestRecord

RECORD = RequestRecord(
    "chatcmpl-1",
    10,
    4,
    5,
    "stop",
    0.25,
    1.5,
    model="demo",
    operation="chat",
    parameters={"temperature": 0.5, "n": 2, "stop": ("a",)},
    client_request_id="mine",
)


def span_of(record: RequestRecord) -> ReadableSpan:
    """Return the span of a record, ended at second 100."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    export(provider.get_tracer("test"), record, ended_at=100.0)
    (span,) = exporter.get_finished_spans()
    return span


def test_span_has_times_and_gen_ai_attributes() -> None:
    span = span_of(RECORD)
    assert (span.name, span.kind) == ("chat demo", SpanKind.SERVER)
    assert (span.start_time, span.end_time) == (98_500_000_000, 100_000_000_000)
    assert [(event.name, event.timestamp) for event in span.events] == [
        ("first token", 98_750_000_000)
    ]
    assert span.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "demo",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("a",),
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "tokenspeed.client_request_id": "mine",
    }
    assert expected.items() <= dict(span.attributes).items()
    assert span.status.status_code is StatusCode.UNSET


def test_client_trace_context_is_the_parent() -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    record = RequestRecord(
        "r", 1, 0, 0, "error", None, 0.1, traceparent=f"00-{trace}-{parent}-01", error="no memory"
    )
    span = span_of(record)
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace, parent)
    assert span.status.status_code is StatusCode.ERROR


def test_malformed_trace_context_is_ignored() -> None:
    span = span_of(RequestRecord("r", 1, 0, 0, "stop", None, 0.1, traceparent="00-x"))
    assert span.parent is None


def test_hook_exports_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    hooks.provider.cache_clear()
    try:
        hooks.observe_request(RECORD)
        provider = hooks.provider()
        assert provider is not None
        assert provider.force_flush(30_000)
    finally:
        hooks.provider.cache_clear()
        server.shutdown()
        thread.join()
        server.server_close()
    (resource,) = ExportTraceServiceRequest.FromString(received[0]).resource_spans
    (service,) = (a for a in resource.resource.attributes if a.key == "service.name")
    assert service.value.string_value == "tokenspeed"
    assert resource.scope_spans[0].spans[0].name == "chat demo"


def test_hook_without_an_endpoint_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hooks.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    hooks.provider.cache_clear()
    hooks.observe_request(RECORD)
    assert hooks.provider() is None
    hooks.provider.cache_clear()
