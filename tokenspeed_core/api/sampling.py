"""What a user may ask of sampling; the one place where its bounds stand."""

from __future__ import annotations

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


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen. `None` takes the model's own default.

    Raises `pydantic.ValidationError` naming the field and its bound.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n: int = Field(1, ge=1, le=MAX_SEQUENCES, description="sequences to generate from the prompt")
    temperature: float | None = Field(None, ge=0, le=100, description="0 takes the likeliest token")
    top_p: float | None = Field(
        None, gt=0, le=1, description="smallest set of tokens with this probability"
    )
    top_k: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="likeliest tokens kept; 0 or -1: all"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="least probability, as a part of the likeliest"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="off the logit of each token generated"
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="off the logit, for each occurrence"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="divides the logits of tokens in the prompt and output"
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="same seed, same tokens")
    max_tokens: int | None = Field(
        None, ge=1, description="most tokens generated; none: to the context's end"
    )
    stop: tuple[StopString, ...] = Field(
        (), max_length=MAX_STOP_STRINGS, description="end before these"
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=MAX_STOP_TOKENS, description="end at these"
    )
    ignore_eos: bool = Field(False, description="go on past the end-of-sequence token")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="alternatives reported per token"
    )
    logit_bias: dict[TokenId, Bias] = Field(
        default_factory=dict,
        max_length=MAX_LOGIT_BIAS,
        description="added to the logits of these tokens",
    )
    include_stop_str_in_output: bool = Field(False, description="keep the stop string in the text")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
