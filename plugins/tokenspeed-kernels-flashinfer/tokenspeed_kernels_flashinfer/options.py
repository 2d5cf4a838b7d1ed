"""Options of this backend, set with `--backend-option`. Imports no tensor library."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FlashInferOptions(BaseModel):
    """Options of the FlashInfer attention backend, for comparing runs and finding faults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_prefix: bool = Field(
        True,
        description="Read keys that all decode rows share once for all of them (cascade attention).",
    )


DEFAULTS = FlashInferOptions()
