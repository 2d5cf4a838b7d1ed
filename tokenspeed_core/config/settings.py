"""How a setting is declared, and the base class of all settings. A command plugin may extend `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr


def setting(
    default: Any,
    section: str,
    text: str,
    *,
    unit: str | None = None,
    narrow: tuple[str, ...] = (),
    kind: str | None = None,
    takes: str | None = None,
    also: tuple[str, ...] = (),
    is_secret: bool = False,
    is_for_servers: bool = False,
    **bounds: Any,
) -> Any:
    """Declare a setting.

    `narrow` are the keys of more specific flags (`--flag.key`), `kind` is the kind of plugin that the
    setting names, `takes` describes the value if its type does not, and `also` are other names of the setting.
    A secret is never shown. `LLM` refuses a setting for servers.
    """
    extra: dict[str, Any] = {
        "section": section,
        "unit": unit,
        "narrow": list(narrow),
        "kind": kind,
        "takes": takes,
        "also": list(also),
        "is_secret": is_secret,
        "is_for_servers": is_for_servers,
    }
    return Field(default, description=text, json_schema_extra=extra, repr=not is_secret, **bounds)


class Settings(BaseModel):
    """Frozen settings, each declared with `setting`. The class methods answer questions about their declarations."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    sections: ClassVar[Mapping[str, str]] = {
        "model": "Model loading",
        "device": "Device and precision",
        "limits": "Limits and access",
        "scheduler": "Scheduler and memory",
        "parallel": "Parallelism",
        "backends": "Backends",
        "speculation": "Speculative decoding",
        "observability": "Observability",
        "running": "Running",
    }
    """The titles of the sections, in the order of help and documentation."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, name: str) -> str:
        """Return where a value came from: "default", "auto", a flag, a variable, a file or a plugin."""
        return self._origins.get(name, "default")

    @classmethod
    def setting_names(cls) -> list[str]:
        """Return the names of all settings in the order of their sections."""
        return [name for section in cls.sections for name in cls.names_in(section)]

    @classmethod
    def names_in(cls, section: str) -> list[str]:
        """Return the names of the settings of a section."""
        return [name for name in cls.model_fields if cls.metadata(name)["section"] == section]

    @classmethod
    def metadata(cls, name: str) -> dict[str, Any]:
        """Return how a setting is declared; see `setting` for the keys."""
        extra = cls.model_fields[name].json_schema_extra
        assert isinstance(extra, dict)
        return extra

    @classmethod
    def is_switch(cls, name: str) -> bool:
        """Say whether a setting is a flag without a value."""
        return cls.model_fields[name].annotation in (bool, bool | None)

    @classmethod
    def full_name(cls, name: str) -> str:
        """Return the setting of a name or alias, such as `tensor_parallel_size` for `tp`."""
        return next((each for each in cls.model_fields if name in cls.metadata(each)["also"]), name)

    @classmethod
    def flags_of(cls, name: str) -> list[str]:
        """Return the command-line flags of a setting."""
        return [flag(each) for each in (name, *cls.metadata(name)["also"])]

    @classmethod
    def narrowed(cls, name: str) -> str:
        """Return the more specific flags of a setting, for messages."""
        keys = (
            ", ".join(f"{flag(name)}.{key}" for key in cls.metadata(name)["narrow"])
            or f"{flag(name)} alone"
        )
        _, dot, family = str(cls.metadata(name)["kind"]).partition(".")
        return f"{keys}; --kernel-backend {family}[.PHASE|.FORMAT]=NAME" if dot else keys

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return the allowed words of a setting, empty if it takes other values."""
        annotation = cls.model_fields[name].annotation
        kinds = (annotation, *get_args(annotation))
        return tuple(word for kind in kinds for word in get_args(kind) if isinstance(word, str))


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")
