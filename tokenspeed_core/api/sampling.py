"""Sampling parameters of a request with their bounds, and the reasons for which a sequence ends."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tokenspeed_core.api.structured_outputs import StructuredOutputs
from tokenspeed_core.errors import BadRequestError, suggest
from tokenspeed_core.rules import broken_rule

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 300
MAX_SEQUENCES = 128
MAX_PROCESSORS = 4

Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
ProcessorName = Annotated[str, Field(min_length=1, max_length=256)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class FinishReason(IntEnum):
    """Why a sequence ended. The engine aborts a sequence that ends at a stop string."""

    NOT = 0  # the sequence goes on
    STOP = 1  # an end-of-sequence token or a stop token id
    LENGTH = 2
    ABORT = 3
    ERROR = 4


def _as_tuple(value: Any) -> Any:
    """Read "x" as ("x",)."""
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """How to choose the tokens of a request. `None` means the model's default.

    Raises BadRequestError with the field and its bound. `stop` may be one string.

    >>> SamplingParams(temperature=0, stop="END")
    SamplingParams(temperature=0.0, stop=('END',))
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n: int = Field(1, ge=1, le=MAX_SEQUENCES, description="number of sequences per prompt")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 always takes the most probable token"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="sample from the smallest set of tokens with this probability"
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="sample from this many most probable tokens; 0 or -1: from all",
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="minimum probability, relative to the most probable token"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="subtracted from the logit of each generated token"
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="subtracted from the logit once per occurrence"
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, description="divides the logits of tokens in the prompt and output"
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - 1,
        description="makes sampling repeatable; in bfloat16, other requests may change the logits",
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="maximum number of generated tokens; default: up to the end of the context",
    )
    min_tokens: int = Field(
        0, ge=0, le=2**31 - 1, description="number of tokens before a stop token or stop string"
    )
    stop: Annotated[tuple[StopString, ...], BeforeValidator(_as_tuple)] = Field(
        (), max_length=MAX_STOP_STRINGS, description="strings that end the output"
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=MAX_STOP_TOKENS, description="token ids that end the output"
    )
    ignore_eos: bool = Field(False, description="continue past the end-of-sequence token")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="number of alternatives to report per token"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="number of alternatives to report per prompt token"
    )
    logit_bias: dict[TokenId, Bias] = Field(
        default_factory=dict,
        max_length=MAX_LOGIT_BIAS,
        description="values to add to the logits of tokens",
    )
    logits_processors: dict[ProcessorName, dict[str, Any]] = Field(
        default_factory=dict,
        max_length=MAX_PROCESSORS,
        description="parameters of logits processors, by the names of their plugins",
    )
    include_stop_str_in_output: bool = Field(False, description="keep the stop string in the text")
    skip_special_tokens: bool = Field(True, description="omit special tokens from the text")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="the form that the output must have"
    )

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _bad_parameter(error) from None

        # For pydantic: `model_validate` need not call this __init__, and raises ValidationError.
        __init__.__pydantic_base_init__ = True

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that are not at their default."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                yield name, value


def _bad_parameter(error: ValidationError) -> BadRequestError:
    """Return an error that names the first invalid parameter, its value and the rule."""
    first = error.errors(include_url=False)[0]
    name, *path = first["loc"]
    where = f"{name}{''.join(f'[{part!r}]' for part in path)}"
    if first["type"] == "extra_forbidden":
        hint = suggest(str(name), SamplingParams.model_fields)
        return BadRequestError(f"unknown sampling parameter {name!r}{hint}", str(name))
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    rule = "must be a list" if first["type"] == "tuple_type" else broken_rule(first)
    return BadRequestError(f"{where} is {shown}: {rule}", str(name))
