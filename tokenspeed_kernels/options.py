"""What operators may set of our kernels, with `--backend-option`; no tensor library is imported."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_SPLITS = 64  # 8 * 8, since 8 parts are merged at once, and then what was merged


class AttentionOptions(BaseModel):
    """Options of the Triton attention backend, for those who compare runs or look for a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_splits: int = Field(
        MAX_SPLITS,
        ge=1,
        le=MAX_SPLITS,
        description="most parts into which a decoded row's keys are cut (1: never cut; slower where rows are few)",
    )
    shared_prefix: bool = Field(
        True,
        description="whether keys that all decoded rows share are read once for all of them",
    )


DEFAULTS = AttentionOptions()
