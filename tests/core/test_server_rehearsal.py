"""The requests of nobody by which an API worker finds, before it counts as ready, all that a real one needs."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from server_support import TEMPLATE, make_tokenizer
from tokenspeed_server import warmup as rehearsal
from tokenspeed_server.app import Routes
from tokenspeed_server.lifecycle import Launch, _Life
from tokenspeed_server.service import ModelText, Options, Service
from tokenspeed_server.warmup import rehearse

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.api.parsers import ParserContext, ParserSpec, ReplyEvent
from tokenspeed_core.engine.messages import Ready, WorkerReady
from tokenspeed_core.engine.requests import Defaults
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.text import ChatTemplate, Tokenizer
from tokenspeed_core.text.load import NamedParser

TOKENIZER = make_tokenizer()
heard: list[str] = []
PROMPT = "user: Hello!assistant:"


class Hears:
    """A parser that takes note of each delta."""

    def __init__(self, context: ParserContext) -> None:
        self.context = context

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        heard.append(text)
        return [ReplyEvent("content", text)]

    def finish(self) -> Sequence[ReplyEvent]:
        heard.append("end")
        return []


class Breaks(Hears):
    """A parser that fails at the first delta."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        raise RuntimeError("broken")


class Leaves(Hears):
    """A parser that would end the process."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        sys.exit(5)


def told(record: RequestRecord) -> None:
    raise AssertionError(f"an observer heard of {record}")


def options(parser: str = "Hears", **more: Any) -> Options:
    entry = Entry(
        "reasoning_parsers",
        parser,
        f"{__name__}:x",
        1,
        "acme",
        "1.0",
        "installed",
        "",
        Status.OK,
        "",
    )
    named = NamedParser(entry, ParserSpec(f"{__name__}:{parser}"))
    return Options("m", observers=(told,), parsers=(named, None), **more)


def model_text(tokenizer: Tokenizer | None = TOKENIZER, *, has_template: bool = True) -> ModelText:
    template = (
        ChatTemplate(TEMPLATE, tokenizer.special_tokens)
        if tokenizer is not None and has_template
        else None
    )
    return ModelText(tokenizer, template, Defaults(eos_token_ids=(0,)))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bytes]]:
    """Collect (path, status, body) of what is answered."""
    heard.clear()
    found: list[tuple[str, int, bytes]] = []

    class Listening(Routes):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            parts: list[Any] = []

            async def noting(message: Any) -> None:
                parts.append(message)
                await send(message)

            await super().__call__(scope, receive, noting)
            found.append(
                (scope["path"], parts[0]["status"], b"".join(part["body"] for part in parts[1:]))
            )

    monkeypatch.setattr(rehearsal, "Routes", Listening)
    return found


def test_both_routes_are_served_whole_and_streamed_and_no_observer_and_no_log_hears_of_it(
    answers: list[tuple[str, int, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="tokenspeed")
    caplog.set_level(logging.DEBUG, logger="tokenspeed_core")
    asyncio.run(rehearse(options(api_key="secret"), model_text()))
    paths = ["/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions"]
    assert [(path, status) for path, status, _ in answers] == [(path, 200) for path in paths]
    assert [body.endswith(b"data: [DONE]\n\n") for *_, body in answers] == [
        False,
        True,
        False,
        True,
    ]
    assert b'"text": "Hello!"' in answers[0][2]
    whole, _, *deltas = heard
    assert whole == "".join(deltas[:-1]) == PROMPT, "a prompt comes back as it was rendered"
    assert len(deltas) > 3, "it was streamed token by token"
    assert [record for record in caplog.records if record.name.startswith("tokenspeed")] == []


@pytest.mark.parametrize("text", [model_text(has_template=False), model_text(None)])
def test_a_model_without_a_template_or_a_tokenizer_rehearses_completions(
    answers: list[tuple[str, int, bytes]], text: ModelText
) -> None:
    asyncio.run(rehearse(options(), text))
    assert [(path, status) for path, status, _ in answers] == [("/v1/completions", 200)] * 2


@pytest.mark.parametrize("parser", ["Breaks", "Leaves"])
def test_a_parser_that_fails_keeps_no_worker_from_serving_and_is_named(
    parser: str, answers: list[tuple[str, int, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(asyncio.wait_for(rehearse(options(parser), model_text()), 5))
    assert [status for _, status, _ in answers] == [200, 200, 500, 500]
    assert f"reasoning_parsers {parser} of acme 1.0 fails on a reply: " in caplog.messages[0]


def test_what_a_rehearsal_fails_with_is_in_the_log_for_who_debugs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Routes):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            raise RuntimeError("no rehearsal")

    monkeypatch.setattr(rehearsal, "Routes", Fails)
    caplog.set_level(logging.DEBUG, logger=rehearsal.__name__)
    asyncio.run(rehearse(options(), model_text()))
    said = [
        (record.levelno, record.getMessage(), str(record.exc_info and record.exc_info[1]))
        for record in caplog.records
        if record.name == rehearsal.__name__
    ]
    assert said == [
        (logging.DEBUG, f"rehearsing {path} failed", "no rehearsal")
        for path in ("/v1/completions", "/v1/chat/completions")
        for _ in range(2)
    ]


class Silent:
    """A link to an engine that is ready once the worker says that it can serve."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def send(self, message: Any) -> None:
        assert isinstance(message, WorkerReady)
        heard.append("hello")
        self.ready.set_result(Ready(100, 100, 400, "{}"))


def test_a_worker_says_that_it_can_serve_when_it_has_rehearsed(
    answers: list[tuple[str, int, bytes]],
) -> None:
    async def main() -> None:
        service = Service(options(), Silent())  # type: ignore[arg-type]
        launch = Launch(
            None, service.options, model_text, on_ready=lambda text: heard.append("ready")
        )  # type: ignore[arg-type]
        await _Life(launch, None)._open(service)  # type: ignore[arg-type]
        service.close()

    asyncio.run(main())
    assert len(answers) == 4
    assert heard[-3:] == ["end", "hello", "ready"]
