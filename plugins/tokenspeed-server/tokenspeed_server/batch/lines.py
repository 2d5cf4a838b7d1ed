"""The lines of batch files, in OpenAI's format: requests in, results out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from tokenspeed_server.asgi import Answer

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_ID = 512  # characters of a custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch file. `body` is JSON."""

    custom_id: str
    path: str
    body: bytes


class LineError(Exception):
    """An invalid line. The result has the code and the line's own id, if it has one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_lines(file: IO[bytes], max_bytes: int) -> Iterator[bytes | LineError]:
    """Yield the lines that are not blank; an error for each that is longer than `max_bytes`."""
    while line := file.readline(max_bytes + 1):
        if len(line) > max_bytes:
            while not line.endswith(b"\n") and (line := file.readline(max_bytes)):
                pass
            yield LineError("line_too_long", f"the line is longer than {max_bytes} bytes")
        elif line.strip():
            yield line


def count_lines(file: IO[bytes]) -> int:
    """Return the number of lines that are not blank, and go back to the start of the file."""
    count = sum(1 for line in file if line.strip())
    file.seek(0)
    return count


def parse_line(line: bytes) -> BatchRequest:
    """Return the request of a line. Raises LineError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json", f"the line is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError("invalid_line", "the line must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise LineError(
            "invalid_custom_id", f"custom_id must be a string of 1 to {MAX_ID} characters"
        )
    if value.get("method", "POST") != "POST":
        raise LineError("invalid_method", "method must be POST", custom_id)
    if value.get("url") not in PATHS:
        raise LineError("invalid_url", f"url must be one of {', '.join(PATHS)}", custom_id)
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be a JSON object", custom_id)
    if body.get("stream"):
        raise LineError("invalid_body", "stream must be false in a batch", custom_id)
    return BatchRequest(custom_id, value["url"], json.dumps(body).encode())


def result_line(custom_id: str, answer: Answer) -> bytes:
    """Return the result of a request that was answered. The answer's body is JSON in one line."""
    begin = {"id": _result_id(), "custom_id": custom_id}
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
    }
    head = json.dumps(begin)[:-1] + ', "response": ' + json.dumps(response)[:-1] + ', "body": '
    return head.encode() + answer.body + b'}, "error": null}\n'


def error_line(error: LineError) -> bytes:
    """Return the result of an invalid line."""
    result: dict[str, Any] = {
        "id": _result_id(),
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": error.code, "message": str(error)},
    }
    return json.dumps(result).encode() + b"\n"


def _result_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
