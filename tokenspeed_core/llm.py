"""`LLM`: the engine in the caller's own process, for batches, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.config.keywords import EngineKeywords
from tokenspeed_core.config.schema import read_keywords
from tokenspeed_core.engine.environment import threads_per_rank
from tokenspeed_core.engine.factory import discover, resolve, start
from tokenspeed_core.engine.inputs import EncodedPrompt, InputProcessor, ModelText, Prompt
from tokenspeed_core.engine.interrupts import deferred_interrupts
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.engine.outputs import RequestOutput, SequenceCollector, make_output
from tokenspeed_core.engine.progress import BatchProgress, StartProgress
from tokenspeed_core.engine.stats import EngineStats
from tokenspeed_core.errors import BadRequestError, TokenSpeedError
from tokenspeed_core.kernels.plan import KernelPlan
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.text import Conversation, read_conversations


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt and the sequences generated from it."""

    prompt: EncodedPrompt
    submit: Submit
    sequences: list[SequenceCollector]


class LLM(AbstractContextManager["LLM"]):
    """A model ready to generate. Keywords are the flags of `tokenspeed serve`, with underscores.

    >>> with LLM() as llm:                                             # doctest: +SKIP
    ...     llm.chat("Hello!")[0].outputs[0].text
    """

    kernel_plan: KernelPlan

    def __init__(self, model: str | None = None, **settings: Unpack[EngineKeywords]) -> None:
        """Load a model: a path, a hub id, or by default the bundled demo.

        Raises ConfigError, CheckpointError, PluginError, SelectionError or CapacityError, and EngineDeadError if the warm-up
        or a rank fails.
        """
        given = read_keywords(model, settings)
        catalog = discover(given)
        hooks = Hooks.load(catalog)
        config = hooks.adjust_config(given)
        with StartProgress() as progress:
            # One process keeps torch's default.
            is_alone = config.parallel_sizes().world_size == 1
            num_threads = None if is_alone else threads_per_rank(config, num_reserved=0)
            resolved = resolve(config, catalog, num_threads=num_threads)
            checkpoint = resolved.checkpoint
            text = ModelText.load(config, checkpoint)
            processors = LogitsProcessorTable.of(config, catalog)
            started = start(resolved, catalog, hooks, progress.report, is_batch=True)
        self._engine, self.kernel_plan = started.engine, started.kernel_plan
        # A step cannot end without the other ranks, of which one may be stopped.
        self._end_stuck_step = None if started.ranks is None else started.ranks.kill
        self.tokenizer = text.tokenizer
        self._inputs = InputProcessor(text, started.ready, processors)
        self._name = f"{checkpoint.name!r}, {self.kernel_plan.platform}, {resolved.config.dtype}"
        self._next_id = 0
        self._is_shut_down = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate from texts or `{"prompt_token_ids": [...]}`; return one result per prompt, in order.

        `use_tqdm` shows a progress bar if stderr is a terminal.
        Raises BadRequestError, before anything runs, for an invalid prompt or parameter, and TokenSpeedError
        after `shutdown` or if a step failed on the device.
        """
        given = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        return self._generate(
            [self._inputs.encode(prompt) for prompt in given], sampling_params, use_tqdm
        )

    def _generate(
        self,
        given: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if self._is_shut_down:
            raise TokenSpeedError("this LLM is shut down; create another one")
        params = _params_per_prompt(sampling_params, len(given))
        requests = [
            self._make_request(prompt, each) for prompt, each in zip(given, params, strict=True)
        ]
        num_sequences = sum(len(request.sequences) for request in requests)
        with (
            deferred_interrupts(self._end_stuck_step) as check,
            BatchProgress(num_sequences, is_shown=use_tqdm) as progress,
        ):
            self._run(requests, check, progress)
        return [
            make_output(each.prompt, each.submit.prompt.tolist(), each.sequences)
            for each in requests
        ]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, each a text or a list of `{"role": ..., "content": ...}`.

        `tools` and `options` (such as `enable_thinking`) go to the chat template. Raises BadRequestError for
        a wrong message or if the model has no chat template, TemplateError if the template rejects the messages.
        """
        inputs = self._inputs
        encoded = [
            inputs.encode_messages(each, tools, options)
            for each in read_conversations(messages, inputs.template)
        ]
        return self._generate(encoded, sampling_params, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes."""
        self._engine.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return the engine's counters since the start, and the state of the KV cache."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Free the device. Safe to call twice."""
        self._is_shut_down = True
        self._engine.close()

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = ", shut down" if self._is_shut_down else ""
        return f"LLM({self._name}, {self._inputs.limits.longest} tokens{state})"

    def _make_request(self, prompt: EncodedPrompt, params: SamplingParams) -> _Request:
        submit = self._build_submit(prompt, params)
        sequences = [SequenceCollector(params, self.tokenizer) for _ in range(params.n)]
        return _Request(prompt, submit, sequences)

    def _build_submit(self, prompt: EncodedPrompt, params: SamplingParams) -> Submit:
        request_id = self._next_id
        self._next_id += params.n
        return self._inputs.request(request_id, params, prompt.token_ids)

    def _run(
        self,
        requests: Sequence[_Request],
        check: Callable[[], None],
        progress: BatchProgress,
    ) -> None:
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
                for rejected in engine.take_rejected():
                    raise BadRequestError(rejected.message, "structured_outputs")
                for outputs in results:
                    for prompt in outputs.prompts:
                        sequences[prompt.sequence_id].take_prompt(prompt)
                    num_ended = int(np.count_nonzero(outputs.finish))
                    for delta in outputs.each():
                        is_over = sequences[delta.sequence_id].take(
                            delta.token_ids, delta.finish, delta.num_cached_tokens, delta.logprobs
                        )
                        if is_over and not delta.finish:  # by a stop string
                            engine.abort([delta.sequence_id])
                            num_ended += 1
                    progress.add(len(outputs.token_ids), num_ended)
        except BaseException as error:
            # After Ctrl-C too, the next call must not find these sequences running.
            engine.abort(sequences)
            # A second Ctrl-C interrupts a step, which can never be collected.
            is_broken = is_stepping and isinstance(error, KeyboardInterrupt)
            while not is_broken and engine.has_work and engine.step():
                pass
            engine.take_rejected()
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
