"""Log lines: text with time, level and process, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any

from tokenspeed_core.errors import printable

LEVEL_COLORS = {
    logging.DEBUG: "\x1b[2m",
    logging.INFO: "\x1b[32m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_RESET = "\x1b[0m"

# The id of the HTTP request that the current task works on, or "".
current_request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_up_log(level: str, log_format: str, process: str) -> None:
    """Send the log of this process to stderr.

    `log_format` is "text" or "json"; `process` names the process in each line. Levels are colored on a
    terminal, unless NO_COLOR is set (https://no-color.org).
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        has_colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        handler.setFormatter(TextFormatter(process, has_colors=has_colors))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_fields(**values: Any) -> dict[str, Any]:
    """Return the `extra` of a log call: fields of the JSON object. Text lines show the message only."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """Formats `TIME LEVEL PROCESS [REQUEST] MESSAGE`, with the local time in milliseconds."""

    def __init__(self, process: str, *, has_colors: bool) -> None:
        super().__init__()
        self._process = process
        self._has_colors = has_colors

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, with its traceback if there is one."""
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<8}"
        if self._has_colors:
            level = f"{LEVEL_COLORS.get(record.levelno, '')}{level}{_RESET}"
        request = current_request_id.get()
        label = f" [{request}]" if request else ""
        # Messages may quote a client or a plugin.
        message = printable(record.getMessage())
        line = f"{seconds}.{int(record.msecs):03} {level} {self._process}{label}: {message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line, with the time in UTC (RFC 3339)."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a JSON object in one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "timestamp": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := current_request_id.get():
            line["request_id"] = request
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
