"""From what a user asks to what the engine is told: defaults and bounds, applied by one function."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, ValidationError

from tokenspeed_core.api.sampling import SamplingParams, TokenId
from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Ready, Submit
from tokenspeed_core.errors import CheckpointError, TokenSpeedError


class BadRequestError(TokenSpeedError, ValueError):
    """A request that cannot be served as asked. `param` is the field at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class _Generation(SamplingParams):
    """What is read of a generation_config.json, within the bounds of a request's own parameters."""

    eos_token_id: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(lambda given: given if isinstance(given, list) else [given]),
    ] = ()


@dataclass(frozen=True, slots=True)
class Defaults:
    """The model's own sampling, for what a request leaves open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, generation: Mapping[str, Any], eos_token_ids: Sequence[int]) -> Defaults:
        """Read a generation_config.json. Its end-of-sequence ids join those of the model's configuration.

        Raises CheckpointError naming the value that is out of bounds.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id")
        given = {name: generation[name] for name in names if generation.get(name) is not None}
        try:
            read = _Generation(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise CheckpointError(
                f"generation_config.json: {name} is {given[name]!r}: {first['msg']}. "
                "Mend the file or remove that key."
            ) from error
        # As validated: 50.0 and "50" have become 50.
        values = {name: getattr(read, name) for name in given if name != "eos_token_id"}
        values["top_k"] = max(0, values.get("top_k", 0))
        return cls(
            **values, eos_token_ids=tuple(dict.fromkeys((*eos_token_ids, *read.eos_token_id)))
        )


def _pick(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def num_output_tokens(num_prompt: int, max_tokens: int | None, limits: Ready) -> int:
    """Return the most tokens that a sequence may get. Raises BadRequestError where they do not fit."""
    room = limits.longest - num_prompt
    why = (
        f"the model's context is {limits.max_model_len} tokens"
        if limits.max_model_len <= limits.num_kv_tokens
        else f"the KV cache holds {limits.num_kv_tokens} tokens"
    )
    if num_prompt == 0:
        raise BadRequestError("the prompt is empty: it must have at least 1 token", "prompt")
    if room < 1:
        raise BadRequestError(
            f"the prompt has {num_prompt} tokens, and {why}: send at most {limits.longest - 1}",
            "prompt",
            "context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise BadRequestError(
            f"the prompt has {num_prompt} tokens and max_tokens asks for {max_tokens}, together "
            f"{num_prompt + max_tokens}, but {why}: ask for at most {room}, or leave max_tokens out",
            "max_tokens",
            "context_length_exceeded",
        )
    return room if max_tokens is None else max_tokens


def read_ids(given: Any, param: str) -> I32:
    """Return token ids, a list or what can be made one, as int32 [tokens]. Raises BadRequestError naming the first bad.

    Prompts are long, and the device waits: one pass packs and checks all ids.
    """
    whole = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(whole, Sequence):
        raise BadRequestError(
            f"{param} must be a list of token ids; found {type(given).__name__}", param
        )
    with suppress(struct.error, TypeError):  # of what is no integer, or none of 32 bits
        ids = np.frombuffer(struct.pack(f"={len(whole)}i", *whole), np.int32)
        # True packs as 1 and is no token: only where there is a 0 or a 1 can there be one.
        if ids.min(initial=2) > 1 or bool not in map(type, whole):
            return ids
    wrong = (
        isinstance(x, bool) or not isinstance(x, int | np.integer) or abs(int(x)) > 2**31
        for x in whole
    )
    bad = next((i for i, is_wrong in enumerate(wrong) if is_wrong), 0)
    raise BadRequestError(
        f"{param}[{bad}] is {str(whole[bad])[:40]!r}: token ids are integers of 32 bits", param
    )


def check_ids(ids: I32, limits: Ready, param: str) -> None:
    """Raise BadRequestError if a token id lies outside the vocabulary."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size):
        position = int(np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))[0])
        raise BadRequestError(
            f"{param} has the token id {int(ids[position])} at position {position}: "
            f"ids of this model are 0 to {limits.vocab_size - 1}",
            param,
        )


def build_submit(
    request_id: int,
    params: SamplingParams,
    prompt: I32,
    limits: Ready,
    defaults: Defaults,
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> Submit:
    """Resolve a request: every default filled in, every bound checked.

    prompt int32 [tokens]. Raises BadRequestError naming the field, what was found and the bound.
    """
    max_tokens = num_output_tokens(len(prompt), params.max_tokens, limits)
    bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
    stop_ids = np.array(params.stop_token_ids, np.int32)
    check_ids(prompt, limits, "prompt")
    check_ids(bias_ids, limits, "logit_bias")
    check_ids(stop_ids, limits, "stop_token_ids")
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
        priority=priority,
        cache_salt=cache_salt,
    )
