"""The settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from tokenspeed_core.config.backends import PHASES, BackendChoice, backends
from tokenspeed_core.config.readers import json_value, split_numbers
from tokenspeed_core.config.settings import Settings, flag, setting

DEFAULT_MAX_DRAFTS = 8
MAX_DRAFTS = 64
# Settings that are options of a drafter, with their names there.
_OPTIONS = {"eagle3_layers_to_capture": "layers_to_capture"}
# Settings of --speculative-algorithm, with their keys in --speculative-config.
_KEYS = {
    "speculative_num_draft_tokens": "num_speculative_tokens",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_draft_model_path": "model",
    **_OPTIONS,
}
# Settings of the draft model that may be given with either flag, with their defaults.
_WITH_EITHER = {
    "speculative_draft_model_quantization": "auto",
    "speculative_draft_load_format": None,
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter that the settings name. `max_drafts` is None if no setting limits it.

    `is_unquantized` is set if the draft model is not quantized even if the target is. `load_format` is that of the draft
    model's weights; None: the target's. Messages name the flags: `flag` chose the drafter, `options_flag` its options,
    and `model_flag` its model.
    """

    drafter: str
    max_drafts: int | None
    options: Mapping[str, Any]
    draft_model: str | None
    is_unquantized: bool
    load_format: str | None
    flag: str
    options_flag: str
    model_flag: str


class SpeculativeConfig(BaseModel):
    """The value of `--speculative-config`. Other keys are options of the drafter."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    method: str = ""  # refused with the names of the installed drafters, which are not known here
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_DRAFTS, strict=True)
    model: str | None = Field(default=None, min_length=1)


def _refuse_trees(value: int) -> int:
    if value != 1:
        raise ValueError("must be 1: tree drafting is not supported")
    return value


class SpeculationSettings(Settings):
    """Which drafter proposes tokens, and how many. `Config` inherits these settings."""

    speculative_algorithm: str | None = setting(
        None,
        "speculation",
        "Drafter that proposes tokens, such as suffix; default: no speculative decoding.",
        min_length=1,
        kind="drafters",
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "speculation",
        f"Maximum draft tokens per row, plus one; default: {1 + DEFAULT_MAX_DRAFTS}, or the drafter's block size.",
        unit="tokens",
        ge=2,
        le=1 + MAX_DRAFTS,
    )
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(json_value)] = setting(
        None,
        "speculation",
        "Drafter as JSON: method, num_speculative_tokens, model, and drafter options.",
        takes="JSON",
    )
    speculative_draft_model_path: str | None = setting(
        None,
        "speculation",
        "Path or Hugging Face repo id of the draft model, if the drafter needs one.",
        min_length=1,
    )
    speculative_draft_model_quantization: Literal["auto", "unquant"] = setting(
        "auto",
        "speculation",
        "Quantization of the draft model: unquant (none) or auto (as its checkpoint).",
    )
    speculative_draft_load_format: str | None = setting(
        None,
        "speculation",
        "Format of the draft model's weights; default: --load-format.",
        min_length=1,
        kind="load_formats",
    )
    speculative_num_steps: int | None = setting(
        None,
        "speculation",
        "Maximum draft tokens per row; --speculative-num-draft-tokens is one more.",
        unit="tokens",
        ge=1,
        le=MAX_DRAFTS,
    )
    speculative_eagle_topk: Annotated[int, AfterValidator(_refuse_trees)] = setting(
        1, "speculation", "Draft tokens at each position; only 1 is supported."
    )
    eagle3_layers_to_capture: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(split_numbers)
    ] = setting(
        None,
        "speculation",
        "Layer outputs (from 0) that an EAGLE-3 head reads; default: set by the head.",
        takes="N[,N...]",
        min_length=1,
    )

    drafter_attention_backend: BackendChoice = backends(
        "attention",
        "speculation",
        "Attention backends of the draft model; default: --attention-backend.",
        narrow=PHASES,
    )
    draft_moe_backend: BackendChoice = backends(
        "moe",
        "speculation",
        "Mixture-of-experts backends of the draft model; default: --moe-backend.",
    )

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        given = self.speculative_config
        if given is not None and self.speculative_algorithm is not None:
            raise ValueError(
                "--speculative-config and --speculative-algorithm both name a drafter; use one"
            )
        for name, key in _KEYS.items():
            if getattr(self, name) is None:
                continue
            if given is not None:
                raise ValueError(
                    f"{flag(name)} has no effect with --speculative-config; set {key} there"
                )
            if self.speculative_algorithm is None:
                raise ValueError(f"{flag(name)} has no effect without --speculative-algorithm")
        if self.speculation() is None:
            for name, default in _WITH_EITHER.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{flag(name)} has no effect without --speculative-algorithm")
        steps, tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        if steps is not None and tokens is not None and tokens != steps + 1:
            raise ValueError(
                f"--speculative-num-draft-tokens {tokens} contradicts --speculative-num-steps {steps}, which needs "
                f"{steps + 1}; use one of them"
            )
        return self

    def speculation(self) -> Speculation | None:
        """Return the drafter and its settings; None without speculative decoding."""
        given = self.speculative_config
        is_unquantized = self.speculative_draft_model_quantization == "unquant"
        if given is not None:
            return Speculation(
                given.method,
                given.num_speculative_tokens,
                given.model_extra or {},
                given.model,
                is_unquantized,
                self.speculative_draft_load_format,
                flag="--speculative-config",
                options_flag="--speculative-config",
                model_flag="model in --speculative-config",
            )
        if self.speculative_algorithm is None:
            return None
        num_tokens = self.speculative_num_draft_tokens
        options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        return Speculation(
            self.speculative_algorithm,
            self.speculative_num_steps or (None if num_tokens is None else num_tokens - 1),
            {_OPTIONS[name]: value for name, value in options.items()},
            self.speculative_draft_model_path,
            is_unquantized,
            self.speculative_draft_load_format,
            flag="--speculative-algorithm",
            options_flag=", ".join(map(flag, options)) or "--speculative-algorithm",
            model_flag="--speculative-draft-model-path",
        )
