"""The report of a finished request: a record for observers, and a line in the log."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Scope

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.commands.serving import Tokenizer, log_fields
from tokenspeed_server.exchange import EXCHANGE, Exchange
from tokenspeed_server.generation import RECORDING_LEVEL, ParsedRequest
from tokenspeed_server.replies import Reply

PARAMETERS_LEVEL = 1  # of --log-requests-level, from which on a line has the sampling parameters
TEXT_LEVEL = RECORDING_LEVEL  # from which on it has the beginning of prompt and output
WHOLE_TEXT_LEVEL = 3  # from which on it has all of them
_MAX_CHARACTERS = 2048  # of a text at TEXT_LEVEL

log = logging.getLogger("tokenspeed.requests")


def make_record(
    scope: Scope, model: str, request: ParsedRequest, reply: Reply, started_at: float
) -> RequestRecord:
    """Return the record of a request that ended. `started_at` is on the monotonic clock, in seconds."""
    first, usage = reply.first_token_at, reply.usage
    if reply.is_abandoned:
        reason = "abort"
    elif reply.error:
        reason = "error"
    else:
        reason = reply.answers[0].finish_reason
    exchange: Exchange | None = scope.get(EXCHANGE)
    return RequestRecord(
        reply.format.id,
        usage.num_prompt,
        usage.num_cached or 0,
        usage.num_output,
        reason,
        None if first is None else first - started_at,
        time.monotonic() - started_at,
        model=model,
        operation="text_completion" if scope["path"] == "/v1/completions" else "chat",
        parameters=request.params.model_dump(exclude_defaults=True),
        client_request_id="" if exchange is None else exchange.client_request_id,
        traceparent=Headers(scope=scope).get("traceparent", ""),
        error="" if reply.error is None else reply.error.message,
    )


def log_request(
    record: RequestRecord,
    level: int,
    request: ParsedRequest,
    reply: Reply,
    tokenizer: Tokenizer | None,
) -> None:
    """Log one line about a request that ended, with as much as --log-requests-level says."""
    first = record.time_to_first_token
    more: dict[str, Any] = {}
    if level >= PARAMETERS_LEVEL:
        more["parameters"] = dict(record.parameters)
    if level >= TEXT_LEVEL:
        outputs = [np.asarray(tokens, np.int32) for tokens in reply.recorded]
        more["prompts"] = [_shown(tokens, level, tokenizer) for tokens in request.prompts]
        more["outputs"] = [_shown(tokens, level, tokenizer) for tokens in outputs]
    log.info(
        "%s: %s; %d prompt tokens (%d cached), %d output tokens, first token %s, total %.3f s%s",
        record.request_id,
        record.finish_reason,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        "never" if first is None else f"after {first:.3f} s",
        record.duration,
        "".join(f"; {name} {value!r}" for name, value in more.items()),
        extra=log_fields(
            id=record.request_id,
            finish_reason=record.finish_reason,
            prompt_tokens=record.num_prompt_tokens,
            cached_tokens=record.num_cached_tokens,
            output_tokens=record.num_output_tokens,
            time_to_first_token=first,
            seconds=record.duration,
            client_request_id=record.client_request_id,
            **more,
        ),
    )


def _shown(tokens: Any, level: int, tokenizer: Tokenizer | None) -> str | list[int]:
    """Return tokens as text, or as ids without a tokenizer."""
    if level < WHOLE_TEXT_LEVEL:
        tokens = tokens[:_MAX_CHARACTERS]
    if tokenizer is None:
        ids: list[int] = tokens.tolist()
        return ids
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    return text if level >= WHOLE_TEXT_LEVEL else text[:_MAX_CHARACTERS]
