"""`LLM`: the engine in the caller's own process, for batches, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.config import Config
from tokenspeed_core.config.schema import metadata
from tokenspeed_core.engine.factory import discover, load_text, resolve, start
from tokenspeed_core.engine.interrupts import deferred_interrupts
from tokenspeed_core.engine.messages import Outputs, Submit, TokenLogprobs
from tokenspeed_core.engine.outputs import Logprob, RequestOutput, SequenceOutput
from tokenspeed_core.engine.progress import StartProgress
from tokenspeed_core.engine.requests import BadRequestError, Defaults, build_submit, read_ids
from tokenspeed_core.errors import ConfigError, TokenSpeedError
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.text import Assembler

Prompt = str | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]

SERVER_ONLY = frozenset(
    name
    for name in Config.model_fields
    if metadata(name)["section"] in ("api", "parsers") and name != "chat_template"
) | {"log_level_http", "enable_log_requests", "enable_cache_report"}


@dataclass(slots=True)
class _Request:
    """A prompt while its sequences are generated."""

    prompt: Prompt
    params: SamplingParams
    submit: Submit
    token_ids: list[int] = field(
        default_factory=list
    )  # the prompt's, for the result; filled with the first output


@dataclass(slots=True)
class _Output:
    """A sequence while it is generated."""

    request: _Request
    assembler: Assembler | None  # only where stop strings must be watched for
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.NOT
    num_cached: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: str = ""


class LLM(AbstractContextManager["LLM"]):
    """A model ready to generate. Keywords are the flags of `tokenspeed serve`, with underscores.

    >>> with LLM() as llm:                                             # doctest: +SKIP
    ...     llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text
    """

    kernel_plan: KernelPlan

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load a model: a path, a hub id, or nothing for the bundled demo.

        Raises ConfigError, CheckpointError, PluginError, SelectionError or CapacityError.
        """
        for name in settings:
            if name in SERVER_ONLY:
                raise ConfigError(
                    f"{name} is about the HTTP server, which LLM has not; leave it out"
                )
        asked = (
            Config.from_keywords(**settings)
            if model is None
            else Config.from_keywords(model=model, **settings)
        )
        catalog = discover(asked)
        hooks = Hooks.load(catalog)
        config = hooks.adjust_config(asked)
        with StartProgress() as progress:
            resolved = resolve(config, catalog)
            checkpoint = resolved.checkpoint
            self._defaults = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids)
            self.tokenizer, self._template = load_text(config, checkpoint.path)
            started = start(resolved, catalog, hooks, progress.report, is_batch=True)
        self._engine, self.kernel_plan = started.engine, started.kernel_plan
        self._limits = started.ready
        self._next_id = 0
        self._is_shut_down = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate from texts or `{"prompt_token_ids": [...]}`; one result per prompt, in their order.

        Raises BadRequestError, before anything runs, for a prompt or parameters that cannot be served, and
        TokenSpeedError after `shutdown` or when a step failed on the device.
        """
        if self._is_shut_down:
            raise TokenSpeedError("this LLM was shut down: make another")
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _per_prompt(sampling_params, len(given))
        requests = [
            _Request(one, each, self._submit_for(one, each))
            for one, each in zip(given, params, strict=True)
        ]
        sequences = {
            request.submit.request_id + i: _Output(
                request, self._assembler(each) if each.stop else None
            )
            for request, each in zip(requests, params, strict=True)
            for i in range(each.n)
        }
        with deferred_interrupts() as check:
            self._run(requests, sequences, check)
        return [self._result(request, sequences) for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of `{"role": ..., "content": ...}`.

        `tools` are shown to the model, `options` are the chat template's own (such as `enable_thinking`). Raises
        BadRequestError where the model has no chat template, TemplateError where the template refuses.
        """
        if self._template is None or self.tokenizer is None:
            raise BadRequestError(
                "this model has no chat template; give one with chat_template, or use generate"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self._template.render(each, tools, options) for each in conversations]  # type: ignore[arg-type]
        prompts = [
            {
                "prompt": one,
                "prompt_token_ids": self.tokenizer.encode(one, add_special_tokens=False),
            }
            for one in texts
        ]
        return self.generate(prompts, sampling_params)

    def reset_prefix_cache(self) -> None:
        """Forget the content of every cached block."""
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the device. Safe to call twice."""
        self._is_shut_down = True
        self._engine.close()

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _submit_for(self, prompt: Prompt, params: SamplingParams) -> Submit:
        if params.stop and self.tokenizer is None:
            raise BadRequestError(
                "stop strings need a tokenizer, and this LLM was made without one", "stop"
            )
        request_id, self._next_id = self._next_id, self._next_id + params.n
        return build_submit(request_id, params, self._ids(prompt), self._limits, self._defaults)

    def _run(
        self, requests: list[_Request], sequences: dict[int, _Output], check: Callable[[], None]
    ) -> None:
        """Submit requests and step until all are done; `check` may raise KeyboardInterrupt between steps."""
        try:
            for request in requests:
                refused = self._engine.submit(request.submit)
                if refused is not None:
                    raise BadRequestError(refused.message)
            while self._engine.has_work:
                check()
                for outputs in self._engine.step():
                    self._take(sequences, outputs)
        except BaseException:  # Ctrl-C included: what runs must not run on in the next call
            self._engine.abort(sequences)
            while self._engine.has_work and self._engine.step():
                pass
            if (
                self._engine.has_work
            ):  # a second Ctrl-C cut a step short, which will never be collected
                self.shutdown()
            raise

    def _ids(self, prompt: Prompt) -> I32:
        if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
            if (ids := prompt.get("prompt_token_ids")) is not None:
                return read_ids(ids, "prompt_token_ids")
            prompt = prompt.get("prompt", prompt)
        if not isinstance(prompt, str):
            raise BadRequestError(
                "a prompt is a text, {'prompt': text} or {'prompt_token_ids': [...]}", "prompt"
            )
        if self.tokenizer is None:
            raise BadRequestError(
                "a text needs a tokenizer, and this LLM was made without one", "prompt"
            )
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _assembler(self, params: SamplingParams) -> Assembler:
        assert self.tokenizer is not None
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        return Assembler(detokenizer, params.stop, params.include_stop_str_in_output)

    def _take(self, sequences: dict[int, _Output], outputs: Outputs) -> None:
        """Note what a step gave, and prepare results as far as they are known: the device works on the next step."""
        for delta in outputs.each():
            output = sequences[delta.sequence_id]
            if output.finish:
                continue  # tokens after a stop string
            request = output.request
            if not request.token_ids:
                request.token_ids = request.submit.prompt.tolist()
            output.token_ids += delta.token_ids
            if delta.logprobs is not None:
                num_top = request.params.logprobs or 0
                output.logprobs += _entries(delta.token_ids, delta.logprobs, num_top)
            if delta.finish:
                output.finish = FinishReason(delta.finish)
            output.num_cached = output.num_cached or delta.num_cached_tokens
            if output.assembler is not None:
                output.text += output.assembler.feed(delta.token_ids, delta.finish)
                if output.assembler.finish_reason == "stop" and not delta.finish:
                    output.finish = FinishReason.STOP
                    self._engine.abort([delta.sequence_id])
            elif delta.finish and self.tokenizer is not None:
                assembler = self._assembler(request.params)
                output.text = assembler.feed(output.token_ids, delta.finish)

    def _result(self, request: _Request, sequences: dict[int, _Output]) -> RequestOutput:
        its = [sequences[request.submit.request_id + i] for i in range(request.submit.n)]
        outputs = [self._finished(i, output) for i, output in enumerate(its)]
        text = request.prompt if isinstance(request.prompt, str) else request.prompt.get("prompt")
        return RequestOutput(text, request.token_ids, outputs, its[0].num_cached)

    def _finished(self, index: int, output: _Output) -> SequenceOutput:
        if output.finish is FinishReason.ERROR:
            raise TokenSpeedError(
                "a sequence was broken off: its step failed on the device, or the model gave it no finite logit; the "
                "log says which"
            )
        text = None if self.tokenizer is None else output.text
        logprobs = None if output.request.params.logprobs is None else output.logprobs
        return SequenceOutput(index, output.token_ids, text, output.finish.name.lower(), logprobs)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None,
    num: int,
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if isinstance(params, Mapping) or not all(isinstance(each, SamplingParams) for each in params):
        raise BadRequestError(
            "sampling_params must be a SamplingParams, or a list with one for each prompt"
        )
    if len(params) != num:
        raise BadRequestError(
            f"{num} prompts and {len(params)} sampling_params: give one, or one for each"
        )
    return params


def _entries(
    token_ids: Sequence[int], columns: TokenLogprobs, width: int
) -> Iterator[dict[int, Logprob]]:
    """Yield what is reported of each token: its first `width` alternatives, and itself."""
    for token, value, rank, top in zip(
        token_ids, columns.chosen, columns.ranks, columns.top, strict=True
    ):
        entry = {other: Logprob(its, place) for place, (other, its) in enumerate(top[:width], 1)}
        yield {**entry, token: Logprob(value, rank)}
