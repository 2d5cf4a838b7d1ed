"""Options of this backend, set with `--backend-option`. Imports no tensor library."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class DeepEPOptions(BaseModel):
    """Options of the backend `deepep`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["auto", "normal", "low_latency"] = Field(
        "auto",
        description="DeepEP's kernels: auto or normal, which are the same; set by --deepep-mode.",
    )

    @field_validator("mode")
    @classmethod
    def _is_supported(cls, mode: str) -> str:
        """Refuse the kernels that need more than the memory of GPUs in one node."""
        if mode == "low_latency":
            raise ValueError(
                "low_latency sends through network cards (IBGDA), which this plugin does not support. Use normal."
            )
        return mode
