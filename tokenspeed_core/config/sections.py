"""The sections of the settings, and how a setting is declared."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

Section = Literal[
    "model",
    "device",
    "api",
    "limits",
    "scheduler",
    "parallel",
    "backends",
    "speculation",
    "parsers",
    "observability",
    "running",
]
SECTIONS: dict[Section, str] = {
    "model": "Model loading",
    "device": "Device and precision",
    "api": "API surface",
    "limits": "Limits and access",
    "scheduler": "Scheduler and memory",
    "parallel": "Parallelism",
    "backends": "Backends",
    "speculation": "Speculative decoding",
    "parsers": "Reasoning and tools",
    "observability": "Observability",
    "running": "Running",
}


def setting(
    default: Any,
    section: Section,
    text: str,
    *,
    unit: str | None = None,
    narrow: tuple[str, ...] = (),
    kind: str | None = None,
    takes: str | None = None,
    also: tuple[str, ...] = (),
    **bounds: Any,
) -> Any:
    """Declare a setting.

    `narrow` are the keys of more specific flags (`--flag.key`), `kind` is the kind of plugin that the
    setting names, `takes` describes the value if its type does not, and `also` are other names of the setting.
    """
    extra: dict[str, Any] = {
        "section": section,
        "unit": unit,
        "narrow": list(narrow),
        "kind": kind,
        "takes": takes,
        "also": list(also),
    }
    return Field(default, description=text, json_schema_extra=extra, **bounds)
