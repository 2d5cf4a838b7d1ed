"""From a request's body to sequences in the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed_core.api.parsers import ParserContext
from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import (
    Assembler,
    BadRequestError,
    ByteDetokenizer,
    Detokenizer,
    NamedParser,
    Tokenizer,
    build_submit,
)
from tokenspeed_server.errors import model_not_found
from tokenspeed_server.formats import ChatFormat, CompletionFormat, ResponseFormat, Usage
from tokenspeed_server.parser_chain import ParserChain
from tokenspeed_server.prompts import chat_ids, encode, read_prompts
from tokenspeed_server.protocol import ChatRequest, CompletionRequest, parse_body
from tokenspeed_server.replies import Choice, Reply, ReplyOptions
from tokenspeed_server.service import Options, Service, Serving

MAX_SEQUENCES_PER_REQUEST = 1024
COMPLETION_TOKENS = 16  # OpenAI's default for completions
PROMPT_END_TOKENS = 64  # the end of the prompt that parsers see

Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid request, with its prompts as token ids."""

    body: Body
    params: SamplingParams
    prompts: Sequence[I32]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.body.stream_options
        return options is not None and options.include_usage


def parse_request(service: Service, kind: type[Body], data: bytes) -> ParsedRequest:
    """Parse, check and tokenise a body. Raises BadRequestError and ApiError."""
    body, raw = parse_body(data, kind)
    _check(body, service.options)
    return ParsedRequest(body, body.sampling_params(), _token_ids(body, raw, service.serving))


def start(service: Service, request: ParsedRequest) -> tuple[Reply, list[int]]:
    """Send a request to the engine; return its reply and its sequence ids. Raises BadRequestError."""
    serving, params, body = service.serving, request.params, request.body
    tokenizer = serving.text.tokenizer
    if params.n * len(request.prompts) > MAX_SEQUENCES_PER_REQUEST:
        raise BadRequestError(
            f"{len(request.prompts)} prompts with n={params.n} are more than "
            f"{MAX_SEQUENCES_PER_REQUEST} sequences",
            "n",
        )
    if params.stop and tokenizer is None:
        raise BadRequestError(
            "stop strings need a tokenizer: this server runs with --skip-tokenizer-init", "stop"
        )
    submits = []
    for position, prompt in enumerate(request.prompts):
        try:
            submit = build_submit(
                service.engine.take_ids(params.n),
                _with_default_length(params, body, serving.limits.longest - len(prompt)),
                prompt,
                serving.limits,
                serving.text.defaults,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
        except BadRequestError as error:
            if len(request.prompts) == 1 or error.param not in ("prompt", "max_tokens"):
                raise
            raise BadRequestError(
                f"prompt[{position}]: {error}", error.param, error.code
            ) from error
        submits.append(submit)
    reply = _make_reply(service.options, request, tokenizer)
    choices = [_add_choices(service, reply, request, prompt) for prompt in request.prompts]
    for submit, sinks in zip(submits, choices, strict=True):
        service.engine.submit(submit, sinks)
    ids = [submit.request_id + index for submit in submits for index in range(params.n)]
    return reply, ids


def _check(body: Body, options: Options) -> None:
    if body.model is not None and body.model != options.model_name:
        raise model_not_found(body.model, options.model_name)
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", "stream_options")
    if body.priority and not options.has_priorities:
        raise BadRequestError(
            "priority needs a server started with --schedule-policy priority", "priority"
        )


def _token_ids(body: Body, raw: dict[str, Any], serving: Serving) -> list[I32]:
    tokenizer, limits = serving.text.tokenizer, serving.limits
    if isinstance(body, ChatRequest):
        tools = raw.get("tools") or None  # as sent: a model of them would add fields
        return [chat_ids(tokenizer, serving.text.template, body, tools, limits)]
    return [
        prompt
        if isinstance(prompt, np.ndarray)
        else encode(tokenizer, prompt, limits, add_special_tokens=True)
        for prompt in read_prompts(body.prompt)
    ]


def _with_default_length(params: SamplingParams, body: Body, room: int) -> SamplingParams:
    """Return the parameters with OpenAI's default length of completions, or what fits."""
    if params.max_tokens is not None or isinstance(body, ChatRequest):
        return params
    return params.model_copy(update={"max_tokens": min(COMPLETION_TOKENS, max(1, room))})


def _make_reply(options: Options, request: ParsedRequest, tokenizer: Tokenizer | None) -> Reply:
    params, body = request.params, request.body
    kind = ChatFormat if isinstance(body, ChatRequest) else CompletionFormat
    response_format: ResponseFormat = kind(options.model_name, tokenizer, request.wants_usage)
    num_cached = 0 if options.reports_cached_tokens else None
    return Reply(
        response_format,
        ReplyOptions(
            is_stream=body.stream,
            interval=options.stream_interval,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            wants_ids=tokenizer is None,
        ),
        Usage(sum(map(len, request.prompts)), 0, num_cached),
    )


def _add_choices(
    service: Service, reply: Reply, request: ParsedRequest, prompt: I32
) -> list[Choice]:
    params, tokenizer = request.params, service.serving.text.tokenizer
    parsers, context = _parsers(service.options, request.body, tokenizer, prompt)
    skips_special = params.skip_special_tokens and not any(
        parser.spec.reads_special_tokens for parser in parsers
    )
    return [
        reply.add_choice(
            Assembler(
                _detokenizer(tokenizer, skips_special),
                params.stop,
                params.include_stop_str_in_output,
            ),
            ParserChain({str(parser.entry): parser.make(context) for parser in parsers}),
            is_first_of_prompt=index == 0,
        )
        for index in range(params.n)
    ]


def _parsers(
    options: Options, body: Body, tokenizer: Tokenizer | None, prompt: I32
) -> tuple[list[NamedParser], ParserContext]:
    """Return the parsers of a reply and their context. Without tools, no parser looks for calls."""
    if not isinstance(body, ChatRequest) or tokenizer is None:
        return [], ParserContext()
    tools = body.tools or () if body.tool_choice == "auto" else ()
    reasoning_parser, tool_parser = options.parsers
    chosen = (reasoning_parser, tool_parser if tools else None)
    parsers = [parser for parser in chosen if parser is not None]
    if not parsers:
        return [], ParserContext()
    end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return parsers, ParserContext(tuple(tool.model_dump(exclude_unset=True) for tool in tools), end)


def _detokenizer(tokenizer: Tokenizer | None, skips_special: bool) -> Detokenizer:
    if tokenizer is None:
        return ByteDetokenizer(defaultdict(bytes), defaultdict(str))  # tokens have no text
    return tokenizer.detokenizer(skip_special_tokens=skips_special)
