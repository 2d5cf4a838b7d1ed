"""What operators may set of this backend, with `--backend-option`; no tensor library is imported."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FlashInferOptions(BaseModel):
    """Options of attention by FlashInfer, for those who compare runs or look for a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_prefix: bool = Field(
        True,
        description="whether keys that all decoded rows share are read once for all of them",
    )


DEFAULTS = FlashInferOptions()
