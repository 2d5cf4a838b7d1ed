"""`AsyncLLM`: an engine in another process, for asyncio programs that serve many requests at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Self, Unpack

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.config.keywords import EngineKeywords
from tokenspeed_core.config.schema import read_keywords
from tokenspeed_core.engine.client import EngineClient
from tokenspeed_core.engine.engine_process import EngineProcess, engine_programs
from tokenspeed_core.engine.factory import discover
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.engine.messages import Ready, WorkerReady
from tokenspeed_core.engine.outputs import RequestOutput
from tokenspeed_core.engine.prompts import EncodedPrompt, Prompt, PromptEncoder
from tokenspeed_core.engine.requests import Defaults, build_submit
from tokenspeed_core.engine.streams import RequestStream
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.errors import BadRequestError, EngineDeadError, TokenSpeedError
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.text import Conversation, Tokenizer
from tokenspeed_core.text.load import load_text

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
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="text")
        self._requests: dict[str, tuple[RequestStream, range]] = {}
        self._process: EngineProcess | None = None
        self._client: EngineClient | None = None
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
        program, config, checkpoint, self._processors = await self._in_thread(
            _prepare, self._config
        )
        self._defaults = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids)
        self._has_priorities = config.schedule_policy != "fcfs"
        self._name = f"{checkpoint.name!r}"
        self._process = EngineProcess(program)
        self._client = client = EngineClient(self._process.addresses[0])
        await self._process.start(client)
        self._watch = asyncio.create_task(self._process.watch(client))
        self.tokenizer, template = await self._in_thread(load_text, config, checkpoint.path)
        client.send(WorkerReady())
        await asyncio.wait((client.ready, client.dead), return_when=asyncio.FIRST_COMPLETED)
        self._check_alive(client)
        self._encoder = PromptEncoder(self.tokenizer, template, client.ready.result())

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def generate(
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
        is_short = not isinstance(prompt, str) or len(prompt) <= MAX_INLINE_CHARS
        encode = self._encoder_of().encode
        encoded = encode(prompt) if is_short else await self._in_thread(encode, prompt)
        run = self._run(encoded, sampling_params, request_id, priority, delta)
        async with aclosing(run) as outputs:
            async for output in outputs:
                yield output

    async def chat(
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
        encode = self._encoder_of().encode_chat
        encoded = await self._in_thread(encode, messages, tools, options)
        run = self._run(encoded, sampling_params, request_id, priority, delta)
        async with aclosing(run) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request: its last output has the finish reason "abort". Unknown ids are ignored."""
        stream, sequence_ids = self._requests.get(request_id, (None, range(0)))
        if stream is not None and self._client is not None:
            self._client.abort(sequence_ids)
            stream.abort()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine died, does not respond, or is not started."""
        reason = "it is not started" if self._client is None else self._client.why_unhealthy()
        if reason is not None:
            raise EngineDeadError(f"the engine is unhealthy: {reason}")

    async def shutdown(self) -> None:
        """End the engine at once; running requests raise EngineDeadError. Safe to call twice."""
        self._is_shut_down = True
        if self._process is not None:
            await self._process.kill()
        if self._watch is not None:
            await self._watch  # fails the running requests
        if self._client is not None:
            self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __repr__(self) -> str:
        if self._client is None or not self._client.ready.done():
            return "AsyncLLM(not started)"
        state = ", shut down" if self._is_shut_down else f", {len(self._requests)} requests"
        return f"AsyncLLM({self._name}, {self._client.ready.result().longest} tokens{state})"

    async def _run(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        is_delta: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and yield its outputs. Aborts it if the caller leaves early."""
        client, limits = self._started()
        params = SamplingParams() if params is None else params
        request_id = uuid.uuid4().hex if request_id is None else request_id
        self._check(request_id, params, priority)
        submit = build_submit(
            client.take_ids(params.n),
            params,
            prompt.token_ids,
            limits,
            self._defaults,
            priority=priority,
            processors=self._processors,
        )
        stream = RequestStream(request_id, prompt, params, self.tokenizer, is_delta=is_delta)
        sequence_ids = range(submit.request_id, submit.request_id + params.n)
        client.submit(submit, stream.sequences)
        self._requests[request_id] = (stream, sequence_ids)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        except TokenSpeedError:
            self._check_alive(client)
            raise
        finally:
            client.abort(sequence_ids)
            del self._requests[request_id]

    def _check(self, request_id: str, params: Any, priority: int) -> None:
        """Raise BadRequestError for parameters that do not fit this engine."""
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling_params must be a SamplingParams; found {type(params).__name__}"
            )
        if request_id in self._requests:
            raise BadRequestError(f"request_id {request_id!r} is in use", "request_id")
        if params.stop and self.tokenizer is None:
            raise BadRequestError(
                "stop strings need a tokenizer, but none is loaded; use stop_token_ids", "stop"
            )
        if priority and not self._has_priorities:
            raise BadRequestError("priority needs schedule_policy='priority'", "priority")

    def _started(self) -> tuple[EngineClient, Ready]:
        """Return the client and the engine's limits. Raises TokenSpeedError before start and after shutdown."""
        client = self._client
        if self._is_shut_down:
            raise TokenSpeedError("this AsyncLLM is shut down; create another one")
        if client is None or not client.ready.done():
            raise TokenSpeedError(
                "this AsyncLLM is not started; use `async with`, or await start()"
            )
        self._check_alive(client)
        return client, client.ready.result()

    def _encoder_of(self) -> PromptEncoder:
        self._started()
        return self._encoder

    def _check_alive(self, client: EngineClient) -> None:
        if client.dead.done():
            raise EngineDeadError(f"the engine died: {client.dead.result()}")

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)


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
