"""Sampling parameters of a request with their bounds, and the reasons for which a sequence ends."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 300
MAX_SEQUENCES = 128

Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class FinishReason(IntEnum):
    """Why a sequence ended. The engine aborts a sequence that ends at a stop string."""

    NOT = 0  # the sequence goes on
    STOP = 1  # an end-of-sequence token or a stop token id
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class SamplingParams(BaseModel):
    """How to choose the tokens of a request. `None` means the model's default.

    Raises `pydantic.ValidationError` with the field and its bound.
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
        None, gt=0, le=10, description="divides the logits of tokens in the prompt and output"
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="makes sampling reproducible"
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of generated tokens; default: up to the end of the context",
    )
    stop: tuple[StopString, ...] = Field(
        (), max_length=MAX_STOP_STRINGS, description="strings that end the output"
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=MAX_STOP_TOKENS, description="token ids that end the output"
    )
    ignore_eos: bool = Field(False, description="continue past the end-of-sequence token")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="number of alternatives to report per token"
    )
    logit_bias: dict[TokenId, Bias] = Field(
        default_factory=dict,
        max_length=MAX_LOGIT_BIAS,
        description="values to add to the logits of tokens",
    )
    include_stop_str_in_output: bool = Field(False, description="keep the stop string in the text")
    skip_special_tokens: bool = Field(True, description="omit special tokens from the text")
