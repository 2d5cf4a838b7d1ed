"""The settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from tokenspeed_core.config.backends import AUTO, BackendChoice
from tokenspeed_core.config.readers import json_value
from tokenspeed_core.config.settings import Settings, setting

DEFAULT_MAX_DRAFTS = 8
MAX_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter that the settings name. `flag` is the flag that names it, `model_flag` the one for its model."""

    drafter: str
    max_drafts: int
    options: Mapping[str, Any]
    flag: str
    draft_model: str | None
    model_flag: str


class SpeculativeConfig(BaseModel):
    """The value of `--speculative-config`. Other keys are options of the drafter."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    method: str = Field(min_length=1)
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_DRAFTS)
    model: str | None = Field(default=None, min_length=1)


class SpeculationSettings(Settings):
    """Which drafter proposes tokens, and how many. `Config` inherits these settings."""

    speculative_algorithm: Annotated[
        str | None, AfterValidator(lambda name: name and name.lower())
    ] = setting(
        None,
        "speculation",
        "Drafter that proposes tokens, such as suffix; default: no speculative decoding.",
        min_length=1,
        kind="drafters",
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "speculation",
        f"Maximum tokens to verify in a row, its last token included; default: {1 + DEFAULT_MAX_DRAFTS}.",
        unit="tokens",
        ge=2,
        le=1 + MAX_DRAFTS,
    )
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(json_value)] = setting(
        None,
        "speculation",
        "Drafter as JSON: method, num_speculative_tokens, model, and its options.",
        takes="JSON",
    )
    speculative_draft_model_path: str | None = setting(
        None,
        "speculation",
        "Path or Hugging Face repo id of the draft model, if the drafter needs one.",
        min_length=1,
    )

    drafter_attention_backend: BackendChoice = setting(
        {"default": AUTO},
        "speculation",
        "Attention backends of the draft model; default: --attention-backend.",
        narrow=("prefill", "decode"),
        kind="kernels.attention",
        takes="NAME[,NAME...]",
    )
    draft_moe_backend: BackendChoice = setting(
        {"default": AUTO},
        "speculation",
        "Mixture-of-experts backends of the draft model; default: --moe-backend.",
        kind="kernels.moe",
        takes="NAME[,NAME...]",
    )

    @model_validator(mode="after")
    def _refuse_two_drafters(self) -> Self:
        given = self.speculative_config
        if given is not None and self.speculative_algorithm is not None:
            raise ValueError(
                "--speculative-config and --speculative-algorithm both name a drafter; use one"
            )
        if self.speculative_draft_model_path is not None:
            if given is not None:
                raise ValueError(
                    "--speculative-draft-model-path has no effect with --speculative-config; set model there"
                )
            if self.speculative_algorithm is None:
                raise ValueError(
                    "--speculative-draft-model-path has no effect without --speculative-algorithm"
                )
        if self.speculative_num_draft_tokens is not None:
            if given is not None:
                raise ValueError(
                    "--speculative-num-draft-tokens has no effect with --speculative-config; set num_speculative_tokens "
                    "there"
                )
            if self.speculative_algorithm is None:
                raise ValueError(
                    "--speculative-num-draft-tokens has no effect without --speculative-algorithm"
                )
        return self

    def speculation(self) -> Speculation | None:
        """Return the drafter and its settings; None without speculative decoding."""
        given = self.speculative_config
        if given is not None:
            return Speculation(
                given.method.lower(),
                given.num_speculative_tokens or DEFAULT_MAX_DRAFTS,
                given.model_extra or {},
                "--speculative-config",
                given.model,
                "model in --speculative-config",
            )
        if self.speculative_algorithm is None:
            return None
        num_tokens = self.speculative_num_draft_tokens or 1 + DEFAULT_MAX_DRAFTS
        return Speculation(
            self.speculative_algorithm,
            num_tokens - 1,
            {},
            "--speculative-algorithm",
            self.speculative_draft_model_path,
            "--speculative-draft-model-path",
        )
