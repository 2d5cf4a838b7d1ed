"""From a request's body to sequences in the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tokenspeed_core.api.parsers import ParserContext, ReplyParser
from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import (
    BadRequestError,
    InputProcessor,
    RequestOptions,
    Tokenizer,
    make_assembler,
)
from tokenspeed_server.access import current_tenant
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.errors import model_not_found
from tokenspeed_server.formats import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    RunningUsageFormat,
    Usage,
)
from tokenspeed_server.logprobs import ScoredPrompt
from tokenspeed_server.parser_chain import ParserChain
from tokenspeed_server.prompts import (
    chat_ids,
    effort_options,
    known_parts,
    read_prompts,
)
from tokenspeed_server.protocol import ChatRequest, CompletionRequest, StreamOptions
from tokenspeed_server.replies import Choice, Reply, ReplyOptions
from tokenspeed_server.reply_grammar import (
    ListedCalls,
    can_enforce_schemas,
    grammar_field,
    is_listed,
    reply_grammar,
    reply_reasoning,
)
from tokenspeed_server.reply_parsers import NamedParser, Parsers
from tokenspeed_server.service import Options, Service
from tokenspeed_server.tool_choice import tool_use

RECORDING_LEVEL = 2  # of --log-requests-level, from which on outputs are logged
COMPLETION_TOKENS = 16  # OpenAI's default for completions
PROMPT_END_TOKENS = 64  # the end of the prompt that parsers see

Body = CompletionRequest | ChatRequest
# Makes the format of one answer from the model's name, its tokenizer and the usage, which is counted later.
MakeFormat = Callable[[str, Tokenizer | None, Usage], ResponseFormat]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid request, with its prompts as token ids and the format of its answer."""

    body: Body
    params: SamplingParams
    prompts: Sequence[I32]
    make_format: MakeFormat
    ignored: Sequence[str] = ()  # fields without effect, to name to the client
    echoes: Sequence[str] = ()  # texts of the prompts, if the answer begins with them
    renamed: Mapping[str, str] = field(default_factory=dict)  # fields of the chat: the API's own


def parse_request(service: Service, kind: type[Body], data: bytes) -> ParsedRequest:
    """Parse, check and tokenize a body. Raises BadRequestError and ApiError."""
    parsed = parse_body(data, kind, service.options.unknown_fields)
    tools = known_parts(parsed.raw.get("tools") or ())
    make_format = _openai_format(parsed.body)
    return prepare(service, parsed.body, tools, make_format, ignored=parsed.ignored)


def prepare(
    service: Service,
    body: Body,
    tools: Sequence[Mapping[str, Any]] | None,
    make_format: MakeFormat,
    *,
    ignored: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> ParsedRequest:
    """Check and tokenize a request of any API. `tools` are in OpenAI's chat format.

    The response names the fields in `ignored`. Errors of the engine name fields by `renamed`. Raises BadRequestError
    and ApiError.
    """
    _check(body, service.options)
    params = body.sampling_params()
    prompts = _token_ids(body, tools or None, service.inputs)
    echoes = _echoes(body, prompts, service.inputs.text.tokenizer)
    ignored = [*ignored, *_fields_without_effect(service, body)]
    service.ignored_fields.note(ignored)
    return ParsedRequest(body, params, prompts, make_format, ignored, echoes, renamed or {})


def _openai_format(body: Body) -> MakeFormat:
    kind = ChatFormat if isinstance(body, ChatRequest) else CompletionFormat
    options = body.stream_options or StreamOptions()

    def make(model: str, tokenizer: Tokenizer | None, usage: Usage) -> ResponseFormat:
        if options.continuous_usage_stats:
            return RunningUsageFormat(kind(model, tokenizer, True), usage)
        return kind(model, tokenizer, options.include_usage)

    return make


def start(service: Service, request: ParsedRequest) -> tuple[Reply, list[int]]:
    """Send a request to the engine; return its reply and its sequence ids. Raises BadRequestError."""
    engine, params, body = service.engine, request.params, request.body
    tokenizer, limits = engine.inputs.text.tokenizer, engine.inputs.limits
    max_sequences = service.options.max_sequences
    if params.n * len(request.prompts) > max_sequences:
        raise BadRequestError(
            f"{len(request.prompts)} prompts with n={params.n} are more than "
            f"{max_sequences} sequences: see --max-sequences-per-request",
            "n",
        )
    submits = []
    for position, prompt in enumerate(request.prompts):
        bounded = _with_default_length(params, body, limits.longest - len(prompt))
        prompt_end = partial(_prompt_end, tokenizer, prompt)
        try:
            grammar = reply_grammar(body, service.options.parsers, prompt_end)
            options = RequestOptions(body.priority, body.cache_salt, grammar, current_tenant())
            submit = engine.request(bounded, prompt, options)
        except BadRequestError as error:
            if len(request.prompts) == 1 or error.param not in ("prompt", "max_tokens"):
                raise
            raise BadRequestError(
                f"prompt[{position}]: {error}", error.param, error.code
            ) from error
        submits.append(submit)
    reply = _make_reply(service.options, request, tokenizer)
    if submits[0].grammar is not None:
        name = grammar_field(body)
        reply.grammar_field = request.renamed.get(name, name)
    choices = [
        _add_choices(service, reply, request, position) for position in range(len(request.prompts))
    ]
    for submit, sinks in zip(submits, choices, strict=True):
        engine.submit(submit, sinks)
    return reply, [sequence_id for submit in submits for sequence_id in submit.sequence_ids]


def _check(body: Body, options: Options) -> None:
    if body.model is not None and body.model != options.model_name:
        raise model_not_found(body.model, options.model_name)
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream to be true", "stream_options")


def _fields_without_effect(service: Service, body: Body) -> list[str]:
    """Return the fields that this model or the server's settings give no effect."""
    if not isinstance(body, ChatRequest):
        return []
    template, (_, tool_parser) = service.inputs.text.template, service.options.parsers
    use, parsers = tool_use(body), service.options.parsers
    has_no_parser = bool(use.tools) and not use.is_forced and tool_parser is None
    names = ["tools"] if has_no_parser else []
    is_strict = any(tool.function.strict for tool in use.tools)
    if is_strict and not (use.is_forced or can_enforce_schemas(use, parsers)):
        names.append("tools[].function.strict")
    if body.reasoning_effort is not None and template is not None:
        names += [] if effort_options(body.reasoning_effort, template) else ["reasoning_effort"]
    return names


def _token_ids(
    body: Body, tools: Sequence[Mapping[str, Any]] | None, inputs: InputProcessor
) -> list[I32]:
    if isinstance(body, ChatRequest):
        return [chat_ids(inputs, body, tools)]
    return [
        prompt
        if isinstance(prompt, np.ndarray)
        else inputs.encode_text(prompt, add_special_tokens=True).token_ids
        for prompt in read_prompts(body.prompt)
    ]


def _with_default_length(params: SamplingParams, body: Body, room: int) -> SamplingParams:
    """Return the parameters with a `max_tokens`: OpenAI's default for completions, or less if the context is shorter."""
    if params.max_tokens is not None or isinstance(body, ChatRequest):
        return params
    return params.model_copy(update={"max_tokens": min(COMPLETION_TOKENS, max(1, room))})


def _make_reply(options: Options, request: ParsedRequest, tokenizer: Tokenizer | None) -> Reply:
    params, body = request.params, request.body
    num_cached = 0 if options.reports_cached_tokens else None
    usage = Usage(sum(map(len, request.prompts)), 0, num_cached)
    response_format = request.make_format(options.model_name, tokenizer, usage)
    return Reply(
        response_format,
        ReplyOptions(
            is_stream=body.stream or response_format.takes_deltas,
            interval=options.stream_interval,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            wants_ids=tokenizer is None,
            records=(options.request_log_level or 0) >= RECORDING_LEVEL,
            max_unsent_bytes=options.max_unsent_bytes,
        ),
        usage,
    )


def _add_choices(
    service: Service, reply: Reply, request: ParsedRequest, position: int
) -> list[Choice]:
    params, tokenizer = request.params, service.inputs.text.tokenizer
    prompt = request.prompts[position]
    scored = _scored_prompt(request, prompt)
    parsers = _parsers(service.options.parsers, request.body, tokenizer, prompt)
    is_single = isinstance(request.body, ChatRequest) and not request.body.parallel_tool_calls
    max_calls = 1 if is_single else None
    reasoning = None
    if params.stop and parsers.chosen:
        reasoning = reply_reasoning(service.options.parsers, parsers.context.prompt_end)
    return [
        reply.add_choice(
            make_assembler(
                params,
                tokenizer,
                skips_special=not parsers.read_special_tokens,
                reasoning=reasoning,
            ),
            ParserChain(parsers.make(), max_calls=max_calls),
            is_first_of_prompt=index == 0,
            echo=request.echoes[position] if request.echoes else "",
            prompt=scored,
        )
        for index in range(params.n)
    ]


def _scored_prompt(request: ParsedRequest, prompt: I32) -> ScoredPrompt | None:
    """Return where the log-probabilities of a prompt are collected, if they are wanted."""
    params, body = request.params, request.body
    if params.prompt_logprobs is None:
        return None
    return ScoredPrompt(
        prompt,
        num_top=body.prompt_logprobs,
        is_echoed=bool(request.echoes) and params.logprobs is not None,
        num_echoed_top=params.logprobs or 0,
        skips_special=params.skip_special_tokens,
    )


def _echoes(body: Body, prompts: Sequence[I32], tokenizer: Tokenizer | None) -> list[str]:
    """Return the texts with which the answers begin: the prompts as sent, or decoded."""
    if isinstance(body, ChatRequest) or not body.echo:
        return []
    given = read_prompts(body.prompt)
    return [
        each
        if isinstance(each, str)
        else ""
        if tokenizer is None
        else tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)
        for each, ids in zip(given, prompts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _ReplyParsers:
    """The parsers of the choices of a prompt. With `is_listed`, calls are a list that the server parses."""

    chosen: Sequence[NamedParser] = ()
    context: ParserContext = field(default_factory=ParserContext)
    is_listed: bool = False

    @property
    def read_special_tokens(self) -> bool:
        return any(parser.spec.reads_special_tokens for parser in self.chosen)

    def make(self) -> dict[str, ReplyParser]:
        """Return new parsers, by names for error messages."""
        made = {str(parser.entry): parser.make(self.context) for parser in self.chosen}
        return {**made, "forced calls": ListedCalls()} if self.is_listed else made


def _parsers(
    parsers: Parsers, body: Body, tokenizer: Tokenizer | None, prompt: I32
) -> _ReplyParsers:
    """Return the parsers of a reply. Without tools, no parser looks for calls."""
    if not isinstance(body, ChatRequest) or tokenizer is None:
        return _ReplyParsers()
    use = tool_use(body)
    reasoning_parser, tool_parser = parsers
    listed = is_listed(use, parsers)
    chosen = (reasoning_parser, tool_parser if use.tools and not listed else None)
    tools = tuple(tool.model_dump(exclude_unset=True) for tool in use.tools)
    return _ReplyParsers(
        [parser for parser in chosen if parser is not None],
        ParserContext(tools, _prompt_end(tokenizer, prompt)),
        listed,
    )


def _prompt_end(tokenizer: Tokenizer | None, prompt: I32) -> str:
    """Return the text of a prompt's last tokens, with special tokens."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
