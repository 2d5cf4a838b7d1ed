"""`AsyncLLM`: an engine in another process, for asyncio programs that serve many requests at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Self, Unpack

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.config.keywords import EngineKeywords
from tokenspeed_core.config.schema import read_keywords
from tokenspeed_core.engine.async_engine import AsyncEngine
from tokenspeed_core.engine.client import EngineClient
from tokenspeed_core.engine.engine_process import EngineProcess, engine_programs
from tokenspeed_core.engine.factory import discover
from tokenspeed_core.engine.inputs import EncodedPrompt, InputProcessor, ModelText, Prompt
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.engine.outputs import RequestOutput
from tokenspeed_core.engine.requests import RequestOptions
from tokenspeed_core.engine.streams import RequestStream
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.errors import BadRequestError, EngineDeadError, TokenSpeedError
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.text import Conversation, read_conversation
from tokenspeed_core.text.tokenizer import Tokenizer

MAX_INLINE_CHARS = 1024  # longer texts, and all chats, are encoded in a thread


class AsyncLLM(AbstractAsyncContextManager["AsyncLLM"]):
    """A model that answers requests concurrently. Keywords are those of `LLM`.

    >>> async with AsyncLLM() as llm:                                  # doctest: +SKIP
    ...     async for output in llm.chat("Hello!"):
    ...         print(output.outputs[0].text)

    The engine runs in another process, which ends with this one. This process imports no tensor library.

    Use an object in one event loop only.
    """

    tokenizer: Tokenizer | None = None

    def __init__(self, model: str | None = None, **settings: Unpack[EngineKeywords]) -> None:
        """Check the settings. `start`, or `async with`, loads the model. Raises ConfigError."""
        self._config = read_keywords(model, settings)
        self._requests: dict[str, tuple[RequestStream, range]] = {}
        self._process: EngineProcess | None = None
        self._engine: AsyncEngine | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_shut_down = False

    async def start(self) -> Self:
        """Start the engine and wait until it is ready.

        Raises CheckpointError, PluginError or CapacityError; and EngineDeadError if the engine cannot start.
        """
        if self._is_shut_down or self._process is not None:
            state = "shut down" if self._is_shut_down else "started already"
            raise TokenSpeedError(f"this AsyncLLM is {state}; create another one")
        try:
            await self._start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def _start(self) -> None:
        program, config, checkpoint, processors = await asyncio.to_thread(_prepare, self._config)
        self._name = f"{checkpoint.name!r}"
        self._process = EngineProcess(program)
        client = EngineClient(self._process.addresses[0])
        self._engine = AsyncEngine(client)
        await self._process.start(client)
        self._watch = asyncio.create_task(self._process.watch(client))
        text = await self._engine.start(partial(ModelText.load, config, checkpoint))
        has_priorities = config.schedule_policy != "fcfs"
        limits = client.ready.result()
        self._engine.open(InputProcessor(text, limits, processors, has_priorities))
        self.tokenizer = text.tokenizer

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Generate from a text or `{"prompt_token_ids": [...]}`; yield outputs as tokens come.

        As with vLLM, each output has all text and tokens so far; with `delta`, only those since the previous output.
        The last output is `finished`. Leaving the loop, or cancelling the task, aborts the request.

        Raises BadRequestError for an invalid prompt or parameter or a `request_id` in use, RequestFailedError if
        the engine rejects or cannot finish the request, and EngineDeadError if it died.
        """
        is_long = isinstance(prompt, str) and len(prompt) > MAX_INLINE_CHARS
        encode = partial(InputProcessor.encode, prompt=prompt)
        return self._run(encode, is_long, sampling_params, request_id, priority, delta)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int = 0,
        delta: bool = False,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, a text or a list of `{"role": ..., "content": ...}`; yield as `generate`.

        `tools` and `options` (such as `enable_thinking`) go to the chat template. Raises the errors of `generate`, and
        TemplateError if the template rejects the messages.
        """

        def encode(inputs: InputProcessor) -> EncodedPrompt:
            conversation = read_conversation(messages, inputs.template)
            return inputs.encode_messages(conversation, tools, options)

        return self._run(encode, True, sampling_params, request_id, priority, delta)

    async def abort(self, request_id: str) -> None:
        """End a request: its last output has the finish reason "abort". Unknown ids are ignored."""
        stream, sequence_ids = self._requests.get(request_id, (None, range(0)))
        if stream is not None and self._engine is not None:
            self._engine.abort(sequence_ids)
            stream.abort()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine died, does not respond, or is not started."""
        engine = self._engine
        reason = "it is not started" if engine is None else engine.connection.why_unhealthy()
        if reason is not None:
            raise EngineDeadError(f"the engine is unhealthy: {reason}")

    async def shutdown(self) -> None:
        """End the engine at once; running requests raise EngineDeadError. Safe to call twice."""
        self._is_shut_down = True
        if self._process is not None:
            await self._process.kill()
        if self._watch is not None:
            await self._watch  # fails the running requests
        if self._engine is not None:
            self._engine.close()

    def __repr__(self) -> str:
        if self._engine is None or not self._engine.is_open:
            return "AsyncLLM(not started)"
        state = ", shut down" if self._is_shut_down else f", {len(self._requests)} requests"
        return f"AsyncLLM({self._name}, {self._engine.inputs.limits.longest} tokens{state})"

    async def _run(
        self,
        encode: Callable[[InputProcessor], EncodedPrompt],
        is_slow: bool,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        is_delta: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Encode and send a request, and yield its outputs. Aborts it if the caller leaves early."""
        engine = self._started()
        inputs = engine.inputs
        prompt = await engine.in_thread(encode, inputs) if is_slow else encode(inputs)
        self._started()
        params = SamplingParams() if params is None else params
        request_id = uuid.uuid4().hex if request_id is None else request_id
        self._check(request_id, params)
        request = engine.request(params, prompt.token_ids, RequestOptions(priority))
        stream = RequestStream(request_id, prompt, params, self.tokenizer, is_delta=is_delta)
        engine.submit(request, stream.sequences)
        self._requests[request_id] = (stream, request.sequence_ids)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        except TokenSpeedError:
            engine.check_alive()
            raise
        finally:
            engine.abort(request.sequence_ids)
            del self._requests[request_id]

    def _check(self, request_id: str, params: Any) -> None:
        """Raise BadRequestError for parameters of another type and for a `request_id` in use."""
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling_params must be a SamplingParams; found {type(params).__name__}"
            )
        if request_id in self._requests:
            raise BadRequestError(
                f"request_id {request_id!r} is in use; choose another one", "request_id"
            )

    def _started(self) -> AsyncEngine:
        """Return the engine. Raises TokenSpeedError before start and after shutdown."""
        if self._is_shut_down:
            raise TokenSpeedError("this AsyncLLM is shut down; create another one")
        if self._engine is None or not self._engine.is_open:
            raise TokenSpeedError(
                "this AsyncLLM is not started; use `async with`, or await start()"
            )
        self._engine.check_alive()
        return self._engine


def _prepare(
    config: Config,
) -> tuple[Program, Config, ResolvedCheckpoint, LogitsProcessorTable]:
    """Find plugins and the checkpoint; return the engine's program. Raises PluginError, CheckpointError."""
    catalog = discover(config)
    adjusted = Hooks.load(catalog).adjust_config(config)
    checkpoint = resolve_checkpoint(adjusted, catalog)
    settled = adjusted.resolved(model=str(checkpoint.path))
    processors = LogitsProcessorTable.of(settled, catalog)
    (program,) = engine_programs(settled, catalog)
    return program, settled, checkpoint, processors
