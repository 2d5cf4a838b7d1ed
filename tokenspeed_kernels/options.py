"""Options of the Triton kernels, set with `--backend-option`. Imports no tensor library."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_SPLITS = 64  # 8 * 8: parts are merged in two rounds, 8 at once


class SharedPrefixOptions(BaseModel):
    """Options of the Triton search for a shared prefix, for comparisons and debugging."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_prefix: bool = Field(
        True,
        description="Cascade attention: read keys once per group of decode rows that shares them, not once per row.",
    )


class AttentionOptions(SharedPrefixOptions):
    """Options of the Triton attention backend, for comparisons and debugging."""

    max_splits: int = Field(
        MAX_SPLITS,
        ge=1,
        le=MAX_SPLITS,
        description="Maximum number of splits of a decode row's keys (1: never split; slower with few rows).",
    )


DEFAULTS = AttentionOptions()
