"""What the API process serves: one model, one engine; whether it takes requests; how a request starts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.api.parsers import ParserContext
from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import (
    Assembler,
    BadRequestError,
    ByteDetokenizer,
    ChatTemplate,
    Defaults,
    Detokenizer,
    EngineClient,
    NamedParser,
    Parsers,
    Ready,
    State,
    Tokenizer,
    build_submit,
)
from tokenspeed_server.chat_reply import Reader
from tokenspeed_server.errors import ApiError
from tokenspeed_server.events import Chat, Completion, Dialect, Usage
from tokenspeed_server.prompts import chat_ids, encode, read_prompts
from tokenspeed_server.protocol import ChatRequest, CompletionRequest, parse
from tokenspeed_server.replies import Choice, Reply, Shape

MAX_SEQUENCES_PER_REQUEST = 1024
MAX_INLINE_BYTES = 4096  # longer bodies are parsed, rendered and tokenised off the event loop
COMPLETION_TOKENS = 16  # OpenAI's default for completions
PROMPT_END_TOKENS = 64  # of the prompt, that parsers are shown

Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class Options:
    """How the server answers. `max_body_bytes` bounds a request's body."""

    model_name: str
    api_key: str | None = field(default=None, repr=False)
    stream_interval: int = 1
    reports_cached_tokens: bool = True
    has_priorities: bool = False
    observers: tuple[Callable[[RequestRecord], None], ...] = ()  # told of each request that ended
    parsers: Parsers = (None, None)
    max_body_bytes: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelText:
    """The model's side of text. Without a tokenizer only token ids pass."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: Defaults


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known once both the text side and the engine are ready."""

    text: ModelText
    limits: Ready


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read: its prompts as ids, and how to answer."""

    body: Body
    params: SamplingParams
    prompts: Sequence[I32]


class Service:
    """Starts requests on the engine, as long as there is one and the server is not draining."""

    def __init__(self, options: Options, link: EngineClient) -> None:
        self.options = options
        self.link = link
        self.serving: Serving | None = None
        self.is_draining = False
        self.num_active = 0
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="text")

    def open(self, text: ModelText, ready: Ready) -> None:
        """Begin to take requests."""
        self.serving = Serving(text, ready)

    def why_unhealthy(self) -> str | None:
        """Return why requests should go elsewhere; None when all is well."""
        if self.is_draining:
            return "the server is shutting down"
        reason = self.link.why_unhealthy()
        if reason is None and self.serving is None:
            return "the server is starting"
        return reason

    def check_open(self) -> None:
        """Raise ApiError while no requests are taken."""
        if self.link.state is State.DEAD:
            raise ApiError(503, "the engine is dead and the server exits", code="engine_dead")
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        if self.serving is None:
            raise ApiError(
                503, "the server is starting", code="starting", headers={"retry-after": "1"}
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a place until the request is answered. Raises as `check_open` does."""
        self.check_open()
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def drained(self) -> None:
        """Take no more requests and wait until those that run are answered."""
        self.is_draining = True
        await self._idle.wait()

    def close(self) -> None:
        """Stop the threads that render and tokenise."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def read(self, kind: type[Body], body: bytes) -> Job:
        """Read a request's body up to its token ids. Raises ApiError and BadRequestError."""
        if len(body) <= MAX_INLINE_BYTES:
            return self._job(kind, body)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._job, kind, body)

    def start(self, job: Job) -> tuple[Reply, list[int]]:
        """Send a request to the engine. Return its reply and its sequences' ids. Raises BadRequestError."""
        serving, params, body, options = self._serving(), job.params, job.body, self.options
        if params.n * len(job.prompts) > MAX_SEQUENCES_PER_REQUEST:
            raise BadRequestError(
                f"{len(job.prompts)} prompts with n={params.n} make more than {MAX_SEQUENCES_PER_REQUEST} sequences",
                "n",
            )
        if params.stop and serving.text.tokenizer is None:
            raise BadRequestError(
                "stop strings need a tokenizer: this server runs with --skip-tokenizer-init", "stop"
            )
        submits = []
        for position, prompt in enumerate(job.prompts):
            try:
                submit = build_submit(
                    self.link.take_ids(params.n),
                    self._with_default_length(params, body, len(prompt)),
                    prompt,
                    serving.limits,
                    serving.text.defaults,
                    priority=body.priority,
                    cache_salt=body.cache_salt,
                )
            except BadRequestError as error:
                if len(job.prompts) == 1 or error.param not in ("prompt", "max_tokens"):
                    raise
                raise BadRequestError(
                    f"prompt[{position}]: {error}", error.param, error.code
                ) from error
            submits.append(submit)
        usage = Usage(sum(map(len, job.prompts)), 0, 0 if options.reports_cached_tokens else None)
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        wants_ids = serving.text.tokenizer is None
        shape = Shape(body.stream, options.stream_interval, num_logprobs, wants_ids)
        reply = Reply(self._dialect(body), shape, usage)
        choices = [self._choices(reply, params, body, prompt) for prompt in job.prompts]
        ids = [submit.request_id + index for submit in submits for index in range(params.n)]
        for submit, sinks in zip(submits, choices, strict=True):
            self.link.submit(submit, sinks)
        return reply, ids

    def _serving(self) -> Serving:
        assert self.serving is not None, "requests are admitted only then"
        return self.serving

    def _job(self, kind: type[Body], body: bytes) -> Job:
        request, params, raw = parse(body, kind)
        self._check(request)
        return Job(request, params, self._encode(request, raw))

    def _check(self, request: Body) -> None:
        options = self.options
        if request.model is not None and request.model != options.model_name:
            raise ApiError(
                404,
                f"the model {request.model!r} does not exist; available: {options.model_name!r}",
                "model",
                "model_not_found",
            )
        if request.stream_options is not None and not request.stream:
            raise BadRequestError("stream_options needs stream to be true", "stream_options")
        if request.priority and not options.has_priorities:
            raise BadRequestError(
                "priority needs a server started with --schedule-policy priority", "priority"
            )

    def _encode(self, request: Body, raw: Mapping[str, Any]) -> list[I32]:
        serving = self._serving()
        tokenizer, limits = serving.text.tokenizer, serving.limits
        if isinstance(request, ChatRequest):
            tools = raw.get("tools") or None
            return [chat_ids(tokenizer, serving.text.template, request, tools, limits)]
        return [
            prompt
            if isinstance(prompt, np.ndarray)
            else encode(tokenizer, prompt, limits, add_special_tokens=True)
            for prompt in read_prompts(request.prompt)
        ]

    def _with_default_length(
        self, params: SamplingParams, body: Body, num_prompt: int
    ) -> SamplingParams:
        """Return the parameters with OpenAI's length for completions that name none: 16, or what fits."""
        if params.max_tokens is not None or isinstance(body, ChatRequest):
            return params
        room = max(1, self._serving().limits.longest - num_prompt)
        return params.model_copy(update={"max_tokens": min(COMPLETION_TOKENS, room)})

    def _dialect(self, body: Body) -> Dialect:
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        kind = Chat if isinstance(body, ChatRequest) else Completion
        return kind(self.options.model_name, self._serving().text.tokenizer, wants_usage)

    def _choices(
        self, reply: Reply, params: SamplingParams, body: Body, prompt: I32
    ) -> list[Choice]:
        parsers, context = self._parsers(body, prompt)
        skips_special = params.skip_special_tokens and not any(
            each.spec.reads_special_tokens for each in parsers
        )
        return [
            reply.add_choice(
                Assembler(
                    self._detokenizer(skips_special), params.stop, params.include_stop_str_in_output
                ),
                Reader({str(each.entry): each.make(context) for each in parsers}),
                is_first_of_prompt=index == 0,
            )
            for index in range(params.n)
        ]

    def _parsers(self, body: Body, prompt: I32) -> tuple[list[NamedParser], ParserContext]:
        """Return who reads the replies to a request, and what they know of it. Without tools there are no calls."""
        tokenizer, (reasoning, calls) = self._serving().text.tokenizer, self.options.parsers
        if not isinstance(body, ChatRequest) or tokenizer is None:
            return [], ParserContext()
        offered = body.tools or () if body.tool_choice == "auto" else ()
        parsers = [each for each in (reasoning, calls if offered else None) if each is not None]
        end = (
            tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
            if parsers
            else ""
        )
        return parsers, ParserContext(
            tuple(tool.model_dump(exclude_unset=True) for tool in offered if parsers), end
        )

    def _detokenizer(self, skips_special: bool) -> Detokenizer:
        tokenizer = self._serving().text.tokenizer
        if tokenizer is None:
            return ByteDetokenizer(defaultdict(bytes), defaultdict(str))  # no token has text
        return tokenizer.detokenizer(skip_special_tokens=skips_special)
