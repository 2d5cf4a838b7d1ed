"""Options of this backend, set with `--backend-option`. Imports no tensor library."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FlashInferOptions(BaseModel):
    """Options of the FlashInfer attention backend, for comparisons and debugging."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_prefix: bool = Field(
        True,
        description="Cascade attention: read keys that all decode rows share once instead of once per row.",
    )


DEFAULTS = FlashInferOptions()
