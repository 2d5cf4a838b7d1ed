"""The application without processes or sockets, on an engine with scripted replies."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2
import openai
from server_support import make_tokenizer
from tokenspeed_server.app import App, create_app
from tokenspeed_server.reply_parsers import Parsers, find_parsers
from tokenspeed_server.service import Options, Service
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.commands.serving import Delivery, RequestFailedError, State
from tokenspeed_core.config.sources import load
from tokenspeed_core.engine.factory import discover
from tokenspeed_core.engine.inputs import ModelText
from tokenspeed_core.engine.messages import Ready, Submit, TokenLogprobs
from tokenspeed_core.engine.requests import Defaults
from tokenspeed_core.text import ChatTemplate

TOKENIZER = make_tokenizer()
LONGEST = 4096
BAD_GRAMMAR = "(bad"  # a grammar with this text is refused
# Each message is a line of JSON, so that tests can read the messages that reached the template.
TEMPLATE = (
    "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }}\n{% endif %}"
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ScriptedEngine:
    """The client of an engine that answers each request with the next text."""

    state = State.READY
    delivery = Delivery()

    def __init__(self, replies: Sequence[str]) -> None:
        self.replies = list(replies)
        self.submitted: list[Submit] = []
        self.aborted: set[int] = set()
        self.is_held = False  # answers no more tokens while it is set
        self.step_size = 1  # tokens that arrive together
        self._next_id = 1

    def take_ids(self, count: int) -> int:
        first, self._next_id = self._next_id, self._next_id + count
        return first

    def submit(self, request: Submit, sinks: Sequence[Any]) -> None:
        self.submitted.append(request)
        if request.grammar is not None and BAD_GRAMMAR in request.grammar.text:
            asyncio.get_running_loop().call_soon(
                sinks[0].fail, RequestFailedError("bad_grammar", "invalid grammar")
            )
            return
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        for index, sink in enumerate(sinks):
            asyncio.get_running_loop().create_task(
                self._answer(request, request.request_id + index, reply, sink)
            )

    def abort(self, sequence_ids: Any) -> None:
        self.aborted.update(sequence_ids)

    def why_unhealthy(self) -> None:
        return None

    def close(self) -> None:
        pass

    async def _answer(self, request: Submit, sequence_id: int, reply: str, sink: Any) -> None:
        ids = TOKENIZER.encode(reply, add_special_tokens=False).tolist()
        ends = len(ids) >= request.max_tokens
        ids = ids[: request.max_tokens] if ends else [*ids, 0]
        for position in range(0, len(ids), self.step_size):
            made = ids[position : position + self.step_size]
            await asyncio.sleep(0)
            while self.is_held and sequence_id not in self.aborted:
                await asyncio.sleep(0.001)
            if sequence_id in self.aborted:
                return
            last = FinishReason.LENGTH if ends else FinishReason.STOP
            finish = last if position + len(made) == len(ids) else FinishReason.NOT
            num_cached = 0 if position else len(request.prompt) - 1
            try:
                columns = None
                if request.logprobs >= 0:
                    top = [[(each, -0.5), (each + 1, -1.5)][: request.logprobs] for each in made]
                    columns = TokenLogprobs([-0.5] * len(made), [1] * len(made), top)
                if sink.take(made, finish, num_cached, columns):
                    return
            except Exception as error:  # as the engine's client does
                logging.exception("the sink failed")
                sink.fail(RequestFailedError("internal", str(error)))
                return

    def prompt(self, number: int = -1) -> str:
        """Return the text of a prompt that was submitted."""
        return TOKENIZER.decode(self.submitted[number].prompt, skip_special_tokens=False)

    def messages(self, number: int = -1) -> list[Any]:
        """Return the messages that the template rendered."""
        lines = self.prompt(number).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def tools(self, number: int = -1) -> Any:
        """Return the tools that the template rendered."""
        lines = [line for line in self.prompt(number).splitlines() if line.startswith("[")]
        return json.loads(lines[0]) if lines else None


def parsers(reasoning: str | None = "qwen3", tools: str | None = "hermes") -> Parsers:
    """Return the parsers with these names."""
    config = load(
        ServerConfig,
        {"reasoning_parser": reasoning or "none", "tool_call_parser": tools or "none"},
        {},
        None,
    )
    return find_parsers(config, discover(config))


PARSERS = parsers()


@contextmanager
def scripted(*replies: str, **options: Any) -> Iterator[tuple[App, ScriptedEngine]]:
    """Return an application and its engine. Needs a running event loop."""
    engine = ScriptedEngine(replies or ("hello",))
    fields: dict[str, Any] = {"model_name": "fake", "parsers": PARSERS, **options}
    service = Service(Options(**fields), engine)  # type: ignore[arg-type]
    template = ChatTemplate(TEMPLATE, TOKENIZER.special_tokens)
    text = ModelText(TOKENIZER, template, Defaults(temperature=0.7, eos_token_ids=(0,)))
    service.open(text, Ready(LONGEST, LONGEST, 400, "{}"))
    try:
        yield create_app(service), engine
    finally:
        service.close()


async def leave_early(app: App, engine: ScriptedEngine, path: str, body: Any) -> bytes:
    """Post a body, disconnect after the first part of the stream, and return the bytes of the answer."""
    sent: list[bytes] = []
    has_begun = asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent[-1]:
            engine.is_held = True  # no token until the application has seen the disconnect
            has_begun.set()

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app({**scope, "server": ("test", 80)}, receive, send)
    return b"".join(sent)


def http(app: App) -> httpx2.AsyncClient:
    """Return an HTTP client of an application."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test")


@asynccontextmanager
async def serving(
    *replies: str, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedEngine]]:
    """Return OpenAI's client of an application, and the application's engine."""
    with scripted(*replies, **options) as (app, engine):
        async with openai.AsyncOpenAI(
            api_key="secret", base_url="http://test/v1", http_client=http(app), max_retries=0
        ) as client:
            yield client, engine


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in an event loop."""
    asyncio.run(test())
