"""The routes with metrics: `/metrics` for Prometheus, and `/v1/stats` for a dashboard."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from tokenspeed_server.admission import get_service
from tokenspeed_server.answers import Stats
from tokenspeed_server.errors import ApiError
from tokenspeed_server.openapi import describe_answer, describe_errors

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse, responses=describe_errors(401, 404))
async def metrics(request: Request) -> Response:
    """Return the metrics of all API workers and the engine in Prometheus's format."""
    service = get_service(request)
    prometheus = service.observability.prometheus
    if prometheus is None:
        raise ApiError(404, "metrics are off: see --enable-metrics and --metrics-reporters")
    body, content_type = await service.engine.in_thread(prometheus.page)
    return Response(body, headers={"content-type": content_type})


@router.get("/v1/stats", responses=describe_answer(Stats, 401))
async def stats(request: Request) -> JSONResponse:
    """Return the state of the engine and its rates over the last 10 seconds, renewed every second.

    - `model`: the served model; `engine`: "starting", "ready" or "dead".
    - `requests`: `running` and `waiting`, in sequences.
    - `kv_cache`: `usage` from 0 to 1, and `pages`: `free`, `cached`, `held`, `pending`.
    - `totals` since the start: `steps`, `preemptions`, `prompt_tokens`, `prefill_tokens` (computed),
      `output_tokens`, `prefix_cache_queries` and `prefix_cache_hits` (in tokens).
    - `window`: `seconds`, `steps`, `prompt_tokens_per_s`, `output_tokens_per_s`, `step_seconds`,
      `host_seconds`, `prefix_hit_rate`, `preemptions`. The means are null without a step or a lookup.

    With `--data-parallel-size`, numbers are sums, and `replicas` has those of each engine, or null for
    an engine that is not running.

    Until the engine's first heartbeat, only `model` and `engine` are present.
    """
    service = get_service(request)
    head = {"model": service.options.model_name, "engine": service.engine.connection.state.value}
    return JSONResponse({**head, **service.observability.monitor.as_json()})
