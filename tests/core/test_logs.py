"""Log lines: text, JSON, colors, and the id of the request."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tokenspeed_core.logs import current_request_id, log_fields, set_up_log

Written = Callable[[], str]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Written]:
    """Return a function that returns the text written to stderr; restore the log afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_line_has_time_level_and_process(written: Written) -> None:
    set_up_log("info", "text", "engine")
    logging.getLogger("a.b").info("%d blocks", 3)
    logging.getLogger("a.b").debug("hidden")
    found = re.fullmatch(r"([\d-]+ [\d:]+\.\d{3}) INFO +engine: 3 blocks\n", written())
    assert found
    moment = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S.%f")
    assert abs(moment - datetime.now()) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "colored"),
    [(True, "", True), (True, "1", False), (False, "", False)],
)
def test_only_a_terminal_gets_colors(
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    no_color: str,
    colored: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    set_up_log("info", "text", "server")
    logging.warning("careful")
    assert ("\x1b[" in written()) is colored


def test_json_line_has_fields_and_exception(written: Written) -> None:
    set_up_log("info", "json", "server")
    try:
        raise ValueError("no\nsuch")
    except ValueError:
        logging.getLogger("a").exception("failed\x1b[2J", extra=log_fields(status=500))
    (line,) = written().splitlines()
    found = json.loads(line)
    assert (found["level"], found["process"], found["logger"]) == ("error", "server", "a")
    assert found["status"] == 500
    assert "ValueError" in found["exception"]
    assert datetime.fromisoformat(found["timestamp"]).tzinfo == UTC


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_name_the_current_request(written: Written, log_format: str) -> None:
    set_up_log("info", log_format, "server")
    token = current_request_id.set("abc123")
    try:
        logging.info("during")
    finally:
        current_request_id.reset(token)
    logging.info("after")
    during, after = written().splitlines()
    assert "abc123" in during
    assert "abc123" not in after


def test_text_line_escapes_control_characters(written: Written) -> None:
    set_up_log("info", "text", "server")
    logging.info("from a client: \x1b[2J\x07")
    line = written()
    assert "\x1b" not in line
    assert "\\x1b[2J" in line
