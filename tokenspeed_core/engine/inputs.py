"""Encodes prompts and conversations, and turns them and their sampling parameters into checked requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.logits_processors import LogitsProcessorTable
from tokenspeed_core.engine.messages import Grammar, Ready, Submit
from tokenspeed_core.engine.requests import (
    NO_OPTIONS,
    Defaults,
    RequestOptions,
    check_ids,
    check_text_fits,
    num_output_tokens,
    read_ids,
)
from tokenspeed_core.errors import BadRequestError
from tokenspeed_core.text import ChatTemplate
from tokenspeed_core.text.load import load_text
from tokenspeed_core.text.tokenizer import Tokenizer
from tokenspeed_core.text.user_text import cut_at_breaks

Prompt = str | Mapping[str, Any]
"""A text, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt's token ids, int32 [T], and its text if it was given as text."""

    text: str | None
    token_ids: I32


@dataclass(frozen=True, slots=True)
class ModelText:
    """The model's tokenizer, chat template and default sampling parameters.

    Without a tokenizer, prompts must be token ids.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: Defaults = field(default_factory=Defaults)

    @classmethod
    def load(cls, config: Config, checkpoint: ResolvedCheckpoint) -> ModelText:
        """Load them from a checkpoint. Raises CheckpointError."""
        defaults = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids)
        return cls(*load_text(config, checkpoint.path), defaults)


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Encodes prompts and checks requests, for `LLM`, `AsyncLLM` and API workers. Thread-safe."""

    text: ModelText
    limits: Ready
    logits_processors: LogitsProcessorTable = field(default_factory=LogitsProcessorTable)
    has_priorities: bool = False

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Return a prompt as token ids. Raises BadRequestError."""
        text: Any = prompt
        if isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "prompt_token_ids"}:
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is not None:
                return EncodedPrompt(text, read_ids(ids, "prompt_token_ids"))
        if not isinstance(text, str):
            raise BadRequestError(
                "a prompt must be a string, {'prompt': text} or {'prompt_token_ids': [...]}",
                "prompt",
            )
        return self.encode_text(text, add_special_tokens=True)

    def encode_text(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        must_fit: bool = True,
        param: str = "prompt",
        salt: str = "",
    ) -> EncodedPrompt:
        """Encode a prompt or rendered messages. Errors name the input `param`. Breaks are removed from the text.

        Raises BadRequestError for text that cannot fit the context, without tokenizing all of it. Without
        `must_fit`, it refuses only a text that no tokenizer could make short enough. `salt`: see `Tokenizer.encode`.
        """
        tokenizer = self.tokenizer_for(param)
        shown = "".join(cut_at_breaks(text))
        check_text_fits(tokenizer if must_fit else None, shown, self.limits, param)
        ids = tokenizer.encode_rendered(text, add_special_tokens=add_special_tokens, salt=salt)
        return EncodedPrompt(shown, ids)

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> EncodedPrompt:
        """Render and encode messages that `read_conversation` returned. Raises BadRequestError, TemplateError."""
        text = self.render(messages, tools, options)
        return self.encode_text(text, add_special_tokens=False, param="messages")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of messages, for `encode_text`.

        It has breaks inside control tokens of the messages, so that these are encoded as ordinary text.

        Raises BadRequestError, TemplateError.
        """
        template, tokenizer = self.template, self.text.tokenizer
        if tokenizer is not None:
            protect = template.guard(tokenizer).protect
            messages, tools, options = protect(messages), protect(tools), protect(options)
        return template.render(
            messages, tools, options, add_generation_prompt=add_generation_prompt
        )

    def request(
        self,
        request_id: int,
        params: SamplingParams,
        prompt: I32,
        options: RequestOptions = NO_OPTIONS,
    ) -> Submit:
        """Return a request with all defaults filled in and all bounds checked. Raises BadRequestError.

        prompt int32 [T].
        """
        if params.stop:
            self.tokenizer_for("stop")
        if options.priority and not self.has_priorities:
            raise BadRequestError(
                "priority needs schedule_policy='priority' (--schedule-policy priority)", "priority"
            )
        grammar = options.grammar
        if grammar is None and params.structured_outputs is not None:
            grammar = Grammar(*params.structured_outputs.kind_and_text())
        if grammar is not None and params.ignore_eos:
            raise BadRequestError(
                "ignore_eos cannot be combined with structured output, which ends with an end-of-sequence token: "
                "omit one of them",
                "ignore_eos",
            )
        if params.prompt_logprobs is not None and self.limits.is_bidirectional:
            raise BadRequestError(
                "this model does not support prompt_logprobs (or echo with logprobs), because its attention to prompts is "
                "bidirectional; omit it",
                "prompt_logprobs",
            )
        max_tokens = num_output_tokens(len(prompt), params.max_tokens, self.limits)
        if params.min_tokens > max_tokens:
            raise BadRequestError(
                f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can be generated",
                "min_tokens",
            )
        bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        stop_ids = np.array(params.stop_token_ids, np.int32)
        check_ids(prompt, self.limits, "prompt")
        check_ids(bias_ids, self.limits, "logit_bias")
        check_ids(stop_ids, self.limits, "stop_token_ids")
        defaults = self.text.defaults
        eos = () if params.ignore_eos else defaults.eos_token_ids
        top_k = defaults.top_k if params.top_k is None else max(0, params.top_k)
        return Submit(
            request_id=request_id,
            prompt=prompt,
            n=params.n,
            max_tokens=max_tokens,
            temperature=float(_pick(params.temperature, defaults.temperature)),
            top_k=top_k,
            top_p=float(_pick(params.top_p, defaults.top_p)),
            min_p=float(_pick(params.min_p, defaults.min_p)),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(_pick(params.repetition_penalty, defaults.repetition_penalty)),
            seed=params.seed,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            bias_ids=bias_ids,
            bias_values=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
            stop_token_ids=np.array(sorted({*params.stop_token_ids, *eos}), np.int32),
            priority=options.priority,
            cache_salt=options.cache_salt,
            min_tokens=params.min_tokens,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            grammar=grammar,
            tenant=options.tenant,
            processors=self.logits_processors.encode(params.logits_processors),
        )

    def tokenizer_for(self, param: str) -> Tokenizer:
        """Return the tokenizer for a parameter. Raises BadRequestError, which names it, if there is none."""
        if self.text.tokenizer is None:
            raise BadRequestError(
                f"{param} needs a tokenizer, but --skip-tokenizer-init loads none; use token ids",
                param,
            )
        return self.text.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises BadRequestError if there is none."""
        if self.text.template is None:
            raise BadRequestError(
                "this model has no chat template; set --chat-template, or send a prompt", "messages"
            )
        return self.text.template


def _pick(value: float | None, default: float) -> float:
    return default if value is None else value
