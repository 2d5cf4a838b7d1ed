"""`LLM`: the engine in the caller's own process, for batches, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.config import Config
from tokenspeed_core.config.schema import metadata
from tokenspeed_core.engine.factory import discover, load_text, resolve, start
from tokenspeed_core.engine.interrupts import deferred_interrupts
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.engine.outputs import RequestOutput, SequenceCollector
from tokenspeed_core.engine.progress import StartProgress
from tokenspeed_core.engine.requests import BadRequestError, Defaults, build_submit, read_ids
from tokenspeed_core.errors import ConfigError, TokenSpeedError
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.plugins.hooks import Hooks

Prompt = str | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]

SERVER_ONLY = frozenset(
    name
    for name in Config.model_fields
    if metadata(name)["section"] in ("api", "parsers") and name != "chat_template"
) | {"log_level_http", "enable_log_requests", "enable_cache_report"}


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt and the sequences generated from it."""

    prompt: Prompt
    submit: Submit
    sequences: list[SequenceCollector]

    def result(self) -> RequestOutput:
        """Return the outputs. Raises TokenSpeedError if the engine could not finish a sequence."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt.get("prompt")
        outputs = [sequence.output(i) for i, sequence in enumerate(self.sequences)]
        num_cached_tokens = self.sequences[0].num_cached_tokens
        return RequestOutput(text, self.submit.prompt.tolist(), outputs, num_cached_tokens)


class LLM(AbstractContextManager["LLM"]):
    """A model ready to generate. Keywords are the flags of `tokenspeed serve`, with underscores.

    >>> with LLM() as llm:                                             # doctest: +SKIP
    ...     llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text
    """

    kernel_plan: KernelPlan

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load a model: a path, a hub id, or by default the bundled demo.

        Raises ConfigError, CheckpointError, PluginError, SelectionError or CapacityError.
        """
        for name in settings:
            if name in SERVER_ONLY:
                raise ConfigError(f"{name} configures the HTTP server; remove it from LLM")
        if model is not None:
            settings["model"] = model
        given = Config.from_keywords(**settings)
        catalog = discover(given)
        hooks = Hooks.load(catalog)
        config = hooks.adjust_config(given)
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
        """Generate from texts or `{"prompt_token_ids": [...]}`; return one result per prompt, in order.

        Raises BadRequestError, before anything runs, for an invalid prompt or parameter, and TokenSpeedError
        after `shutdown` or if a step failed on the device.
        """
        if self._is_shut_down:
            raise TokenSpeedError("this LLM is shut down; create another one")
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _params_per_prompt(sampling_params, len(given))
        requests = [
            self._make_request(prompt, each) for prompt, each in zip(given, params, strict=True)
        ]
        with deferred_interrupts() as check:
            self._run(requests, check)
        return [request.result() for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, each a list of `{"role": ..., "content": ...}`.

        `tools` and `options` (such as `enable_thinking`) go to the chat template. Raises BadRequestError if
        the model has no chat template, TemplateError if the template rejects the messages.
        """
        if self._template is None or self.tokenizer is None:
            raise BadRequestError(
                "this model has no chat template; set chat_template, or use generate"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = []
        for conversation in conversations:
            text = self._template.render(conversation, tools, options)  # type: ignore[arg-type]
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params)

    def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes."""
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the device. Safe to call twice."""
        self._is_shut_down = True
        self._engine.close()

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> _Request:
        submit = self._build_submit(prompt, params)
        sequences = [SequenceCollector(params, self.tokenizer) for _ in range(params.n)]
        return _Request(prompt, submit, sequences)

    def _build_submit(self, prompt: Prompt, params: SamplingParams) -> Submit:
        if params.stop and self.tokenizer is None:
            raise BadRequestError(
                "stop strings need a tokenizer, and this LLM has none; use stop_token_ids", "stop"
            )
        request_id = self._next_id
        self._next_id += params.n
        ids = self._encode(prompt)
        return build_submit(request_id, params, ids, self._limits, self._defaults)

    def _encode(self, prompt: Prompt) -> I32:
        if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
            ids = prompt.get("prompt_token_ids")
            if ids is not None:
                return read_ids(ids, "prompt_token_ids")
            prompt = prompt.get("prompt", prompt)
        if not isinstance(prompt, str):
            raise BadRequestError(
                "a prompt must be a string, {'prompt': text} or {'prompt_token_ids': [...]}",
                "prompt",
            )
        if self.tokenizer is None:
            raise BadRequestError(
                "a text prompt needs a tokenizer, and this LLM has none; pass prompt_token_ids",
                "prompt",
            )
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _run(self, requests: Sequence[_Request], check: Callable[[], None]) -> None:
        """Submit requests and step until all are done; `check` may raise KeyboardInterrupt between steps."""
        engine = self._engine
        sequences: dict[int, SequenceCollector] = {}
        for request in requests:
            sequences.update(enumerate(request.sequences, request.submit.request_id))
        is_stepping = False
        try:
            for request in requests:
                rejected = engine.submit(request.submit)
                if rejected is not None:
                    raise BadRequestError(rejected.message)
            while engine.has_work:
                check()
                is_stepping = True
                results = engine.step()
                is_stepping = False
                for outputs in results:
                    for delta in outputs.each():
                        if sequences[delta.sequence_id].take(delta):
                            engine.abort([delta.sequence_id])
        except BaseException as error:
            # After Ctrl-C too, the next call must not find these sequences running.
            engine.abort(sequences)
            # A second Ctrl-C interrupts a step, which can never be collected.
            is_broken = is_stepping and isinstance(error, KeyboardInterrupt)
            while not is_broken and engine.has_work and engine.step():
                pass
            if engine.has_work:
                self.shutdown()
            raise


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, Mapping) or not all(isinstance(each, SamplingParams) for each in params):
        raise BadRequestError("sampling_params must be a SamplingParams, or a list of them")
    if len(params) != num_prompts:
        raise BadRequestError(
            f"{num_prompts} prompts and {len(params)} sampling_params: give one, or one per prompt"
        )
    return params
