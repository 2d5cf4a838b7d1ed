"""What a user may set of a backend, `--backend-option BACKEND.KEY=VALUE`, as the schema of its plugin reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.errors import SelectionError


def described(spec: KernelSpec, schema: type[BaseModel]) -> dict[str, str]:
    """Return what may be set, by "backend.key", with the schema's words on it. A field's key is its alias, if any."""
    fields = schema.model_fields.items()
    return {
        f"{spec.backend}.{each.validation_alias or name}": each.description or ""
        for name, each in fields
    }


def settle(spec: KernelSpec, given: Mapping[str, Any]) -> BaseModel | None:
    """Return the options of a kernel, those of `given` that are its own and the schema's defaults; None of no schema.

    Raises as imports do, and in the schema's words SelectionError for what was given, ValueError where nothing was.
    """
    schema = spec.schema()
    if schema is None:
        return None
    own = {name: given[name] for name in described(spec, schema) if name in given}
    typed = " ".join(f"--backend-option {name}={value}" for name, value in own.items())
    try:
        return schema(
            **{name.removeprefix(f"{spec.backend}."): _read(value) for name, value in own.items()}
        )
    except (Exception, SystemExit) as error:  # a plugin's own validators may raise anything
        wrong = error.errors() if isinstance(error, ValidationError) else ()
        said = "; ".join(": ".join([*map(str, each["loc"]), each["msg"]]) for each in wrong)
        said = f"{typed or 'its options'}: {said or f'{type(error).__name__}: {error}'}"
        raise (SelectionError if own else ValueError)(said) from error


def _read(value: Any) -> Any:
    """Read text that begins as a list, an object or a quoted text does as JSON; other text stays as it is."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{", '"') else value
