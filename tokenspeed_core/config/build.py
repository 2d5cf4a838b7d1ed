"""Builds the configuration from values with known origins; errors are one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from tokenspeed_core.config.describe import as_written
from tokenspeed_core.config.flag_aliases import alias_hint
from tokenspeed_core.config.settings import Settings, flag
from tokenspeed_core.errors import ConfigError, suggest
from tokenspeed_core.rules import broken_rule

PYTHON = "Python"
S = TypeVar("S", bound=Settings)


def build(kind: type[S], values: Mapping[str, tuple[Any, str]]) -> S:
    """Build a configuration of that kind from `name: (value, origin)`.

    The origin is a flag, an environment variable, a file or "Python". Raises ConfigError with the
    setting, its value, the rule and the origin, or the nearest name for an unknown one.
    """
    for name, (_, origin) in values.items():
        if name not in kind.model_fields:
            raise ConfigError(unknown(kind, name, origin))
    try:
        config = kind.model_validate({name: value for name, (value, _) in values.items()})
    except ValidationError as error:
        raise ConfigError(_explain(kind, error, values)) from error
    config._origins.update({name: origin for name, (_, origin) in values.items()})
    return config


def rebuild(config: S, changes: Mapping[str, Any], origin: str) -> S:
    """Return a new configuration with changed values, set by `origin`. Raises ConfigError."""
    kept = {
        name: (getattr(config, name), config.origin(name)) for name in type(config).model_fields
    }
    return build(
        type(config), {**kept, **{name: (value, origin) for name, value in changes.items()}}
    )


def called(name: str, origin: str) -> tuple[str, str]:
    """Return a setting's name as the user wrote it, and " (from ORIGIN)" unless it is a flag."""
    is_typed = origin == PYTHON or origin.startswith("--")
    return name if origin == PYTHON else flag(name), "" if is_typed else f" (from {origin})"


def unknown(
    kind: type[Settings],
    name: str,
    origin: str,
    flags: Sequence[str] = (),
    command: str = "tokenspeed serve",
) -> str:
    """Return a message about an unknown setting, with the nearest setting or flag of the command."""
    shown, where = called(name, origin)
    setting, dot, _ = name.partition(".")
    if dot and setting in kind.model_fields:
        return f"{shown}{where}: no such setting; available: {kind.narrowed(setting)}"
    own = [form.removeprefix("--").replace("-", "_") for form in flags] or list(kind.model_fields)
    written = name.replace("-", "_")
    replacement = alias_hint(name, get_close_matches(written, own, cutoff=0.9))
    if replacement is not None:
        return f"{shown}{where}: {replacement}"
    near = get_close_matches(written, own, n=2, cutoff=0.75)
    likely = " or ".join(each if origin == PYTHON else flag(each) for each in near)
    hint = f"`{command} --help` lists the settings"
    if origin == PYTHON:
        hint = "docs/parameters.md lists the settings; those of the server are not keywords"
    if likely:
        hint = f"did you mean {likely}?"
    return f"{shown}{where}: no such setting; {hint}"


def _explain(
    kind: type[Settings], error: ValidationError, values: Mapping[str, tuple[Any, str]]
) -> str:
    """Return a message with the first error of each setting."""
    messages: dict[str, str] = {}
    for each in error.errors(include_url=False):
        message = _bound(kind, each)
        if not each["loc"]:
            messages.setdefault("", message)
            continue
        name = str(each["loc"][0])
        value, origin = values[name]
        shown, where = called(name, origin)
        text = "***" if kind.metadata(name)["is_secret"] else _as_typed(value)
        keys = [part for part in each["loc"][1:] if isinstance(part, str)]
        if name in ("kv_events_config", "speculative_config") and keys:
            message = f"{'.'.join(keys)} {message}"
        messages.setdefault(name, f"{shown} {text}{where}: {message}")
    return "; ".join(messages.values())


def _as_typed(value: Any) -> str:
    text = as_written(value) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bound(config: type[Settings], error: Any) -> str:
    """Return the rule that a value violates."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "is not a known key"
    if kind == "missing":
        return "is missing"
    if kind == "literal_error" and len(error["loc"]) > 1:
        return f"must be {context['expected']}"
    if kind == "literal_error":
        known = config.choices(str(error["loc"][0]))
        return f"must be one of {', '.join(known)}{suggest(str(error['input']), known)}"
    if kind == "value_error":
        return str(context["error"])
    return broken_rule(error)
