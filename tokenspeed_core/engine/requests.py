"""The default sampling parameters of a model, and checks of a request's length and token ids."""

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
from tokenspeed_core.engine.messages import Grammar, Ready
from tokenspeed_core.errors import BadRequestError, CheckpointError
from tokenspeed_core.text.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 256  # the longest token of any vocabulary: more text than this cannot fit
# A longer text is encoded in part before it is encoded as a whole. Few texts have as many characters per token.
PROBED_CHARS_PER_TOKEN = 8


class _Generation(SamplingParams):
    """The settings of a generation_config.json, with the bounds of sampling parameters."""

    eos_token_id: Annotated[
        tuple[TokenId, ...],
        BeforeValidator(lambda given: given if isinstance(given, list) else [given]),
    ] = ()


@dataclass(frozen=True, slots=True)
class Defaults:
    """The model's default sampling parameters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, generation: Mapping[str, Any], eos_token_ids: Sequence[int]) -> Defaults:
        """Read a generation_config.json, and add its end-of-sequence ids to the model's ids.

        Raises CheckpointError if a value is out of bounds.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id")
        given = {name: generation[name] for name in names if generation.get(name) is not None}
        try:
            read = _Generation.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise CheckpointError(
                f"generation_config.json: {name} is {given[name]!r}: {first['msg']}. "
                "Correct the file or remove the key."
            ) from error
        # Validation converts 50.0 and "50" to 50.
        values = {name: getattr(read, name) for name in given if name != "eos_token_id"}
        values["top_k"] = max(0, values.get("top_k", 0))
        return cls(
            **values, eos_token_ids=tuple(dict.fromkeys((*eos_token_ids, *read.eos_token_id)))
        )


def num_output_tokens(num_prompt: int, max_tokens: int | None, limits: Ready) -> int:
    """Return the maximum number of output tokens. Raises BadRequestError if they do not fit the context."""
    room = limits.longest - num_prompt
    limit = _context_limit(limits)
    if num_prompt == 0:
        raise BadRequestError("the prompt is empty; it needs at least 1 token", "prompt")
    needed = 0 if max_tokens == 0 else 1
    if room < needed:
        raise BadRequestError(
            f"the prompt has {num_prompt} tokens, but {limit}: send at most {limits.longest - needed}",
            "prompt",
            "context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise BadRequestError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt + max_tokens}, but {limit}: set max_tokens to at most {room}, or omit it",
            "max_tokens",
            "context_length_exceeded",
        )
    return room if max_tokens is None else max_tokens


def _context_limit(limits: Ready) -> str:
    """Return the limit of the context, in the words that client libraries look for."""
    if limits.max_model_len <= limits.num_kv_tokens:
        return f"this model's maximum context length is {limits.max_model_len} tokens"
    return f"the KV cache holds {limits.num_kv_tokens} tokens"


def check_text_fits(
    tokenizer: Tokenizer | None, text: str, limits: Ready, param: str = "prompt"
) -> None:
    """Raise BadRequestError for a text that cannot fit the context.

    Of a long text, only the beginning is encoded if that shows that the text does not fit. Without a tokenizer, only
    the number of characters is checked. A text that passes may still have too many tokens: `InputProcessor` counts
    them.
    """
    longest, num_chars = limits.longest, len(text)
    is_too_long = num_chars > longest * MAX_CHARS_PER_TOKEN
    num_probed = longest * PROBED_CHARS_PER_TOKEN
    while tokenizer is not None and num_probed < num_chars and not is_too_long:
        # The end of the text may change the last tokens of its beginning, but not an eighth of them.
        is_too_long = tokenizer.count(text[:num_probed]) > longest + longest // 8 + 64
        num_probed *= 4
    if is_too_long:
        raise BadRequestError(
            f"{param} has {num_chars} characters, but {_context_limit(limits)}",
            param,
            "context_length_exceeded",
        )


def read_ids(given: Any, param: str) -> I32:
    """Return a sequence or array of token ids as int32 [T]. Raises BadRequestError naming the first invalid id.

    Prompts are long, so one pass of `struct` packs and checks all ids.
    """
    items = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(items, Sequence):
        raise BadRequestError(
            f"{param} must be a list of token ids; found {type(given).__name__}", param
        )
    with suppress(struct.error, TypeError):
        ids = np.frombuffer(struct.pack(f"={len(items)}i", *items), np.int32)
        # Booleans pack as 0 and 1, so only lists with a 0 or 1 need the check.
        if ids.min(initial=2) > 1 or bool not in map(type, items):
            return ids
    bad = next((i for i, item in enumerate(items) if not _is_token_id(item)), 0)
    raise BadRequestError(
        f"{param}[{bad}] is {str(items[bad])[:40]!r}; token ids are 32-bit integers", param
    )


def _is_token_id(item: Any) -> bool:
    is_integer = isinstance(item, int | np.integer) and not isinstance(item, bool)
    return is_integer and -(2**31) <= int(item) < 2**31


def check_ids(ids: I32, limits: Ready, param: str) -> None:
    """Raise BadRequestError if a token id is outside the vocabulary."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size):
        position = int(np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))[0])
        raise BadRequestError(
            f"{param} has the token id {int(ids[position])} at position {position}, but "
            f"the ids of this model are 0 to {limits.vocab_size - 1}",
            param,
        )


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request other than its prompt and sampling parameters."""

    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None  # instead of that of the sampling parameters
    tenant: str = ""


NO_OPTIONS = RequestOptions()
