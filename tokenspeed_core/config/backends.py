"""Which backends a user wants: names in order of preference, narrowed per phase where asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
AUTO: tuple[str, ...] = ("auto",)


class BackendChoice(BaseModel):
    """Names in order of preference; `("auto",)` leaves the choice to TokenSpeed.

    Built from `"triton"`, `"fast,triton"`, a list, or a mapping such as
    `{"default": "auto", "decode": ["fast", "triton"]}`, which is also what it is written as.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: Names = AUTO
    narrowed: tuple[tuple[str, Names], ...] = ()

    def preference(self, key: str | None = None) -> tuple[str, ...]:
        """Return the names wanted for `key` (a phase, say), best first."""
        return dict(self.narrowed).get(key or "", self.default)

    def is_auto(self, key: str | None = None) -> bool:
        """Say whether TokenSpeed chooses for `key`."""
        return self.preference(key) == AUTO

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            return {"default": _names(value)}
        if isinstance(value, Mapping):
            flat = {str(key): _names(names) for key, names in value.items()}
            default = flat.pop("default", AUTO)
            return {"default": default, "narrowed": tuple(sorted(flat.items()))}
        return value

    @model_serializer
    def _to_mapping(self) -> dict[str, list[str]]:
        return {"default": list(self.default), **{key: list(names) for key, names in self.narrowed}}

    def __str__(self) -> str:
        """Return the choice as a user would type it."""
        narrowed = (f".{key}={','.join(names)}" for key, names in self.narrowed)
        return " ".join([",".join(self.default), *narrowed])


def _names(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(","))
    return tuple(value) if isinstance(value, list) else value
