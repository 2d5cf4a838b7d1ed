"""Backend options: `--backend-option BACKEND.KEY=VALUE`, validated by the plugin's pydantic model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.errors import SelectionError


def describe_options(spec: KernelSpec, schema: type[BaseModel]) -> dict[str, str]:
    """Return the description of each option by "backend.key". A field's key is its alias if it has one."""
    return {
        f"{spec.backend}.{each.validation_alias or name}": each.description or ""
        for name, each in schema.model_fields.items()
    }


def read_options(spec: KernelSpec, given: Mapping[str, Any]) -> BaseModel | None:
    """Return a kernel's options, validated, with the schema's defaults; None if it declares none.

    `given` may hold options of other backends. Raises SelectionError for invalid values, ValueError if the schema
    rejects its own defaults, and whatever the schema's import raises.
    """
    schema = spec.schema()
    if schema is None:
        return None
    own = {name: given[name] for name in describe_options(spec, schema) if name in given}
    prefix = f"{spec.backend}."
    try:
        return schema(**{name.removeprefix(prefix): _parse(text) for name, text in own.items()})
    except (Exception, SystemExit) as error:  # a plugin's own validators may raise anything
        details = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            details = "; ".join(
                ": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors()
            )
        if not own:
            raise ValueError(f"its options: {details}") from error
        flags = " ".join(f"--backend-option {name}={value}" for name, value in own.items())
        raise SelectionError(f"{flags}: {details}") from error


def _parse(value: Any) -> Any:
    """Parse text that starts like a JSON list, object or string; return other values unchanged."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{", '"') else value
