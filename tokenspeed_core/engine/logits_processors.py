"""The installed logits processors, and the parameters that requests give them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_core.api.logits_processors import LogitsProcessorSpec
from tokenspeed_core.config import Config
from tokenspeed_core.errors import BadRequestError, describe_error, suggest
from tokenspeed_core.plugins.catalog import Catalog

MAX_PARAMS_CHARS = 16_384
_FIELD = "logits_processors"


@dataclass(frozen=True, slots=True)
class LogitsProcessorTable:
    """The processors that requests may name; none unless `--enable-custom-logit-processor` is given."""

    is_enabled: bool = False
    specs: Mapping[str, LogitsProcessorSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, catalog: Catalog) -> LogitsProcessorTable:
        """Load the specs of all installed processors. Raises PluginError."""
        if not config.enable_custom_logit_processor:
            return cls()
        entries = catalog.entries(_FIELD)
        return cls(True, {each.name: catalog.need(each, LogitsProcessorSpec) for each in entries})

    def encode(self, wanted: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a request's processors and their parameters as JSON. Raises BadRequestError."""
        if not wanted:
            return ""
        if not self.is_enabled:
            raise BadRequestError(
                "logits processors are disabled; start the server with --enable-custom-logit-processor",
                _FIELD,
            )
        for name, params in wanted.items():
            spec = self.specs.get(name)
            if spec is None:
                available = ", ".join(sorted(self.specs))
                others = f"; available: {available}" if available else "; none is installed"
                hint = suggest(name[:64], self.specs) or others
                raise BadRequestError(f"no logits processor {name[:64]!r}{hint}", _FIELD)
            try:
                spec.check_params(params)
            except ValueError as error:
                raise BadRequestError(f"{_FIELD}[{name!r}]: {error}", _FIELD) from error
            except Exception as error:  # plugin code may raise anything
                raise BadRequestError(
                    f"{_FIELD}[{name!r}]: the check of the plugin failed: {describe_error(error)}",
                    _FIELD,
                ) from error
        try:
            text = json.dumps(wanted)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequestError(f"{_FIELD} must be JSON: {error}", _FIELD) from error
        if len(text) > MAX_PARAMS_CHARS:
            raise BadRequestError(
                f"{_FIELD} has {len(text)} characters of JSON; send at most {MAX_PARAMS_CHARS}",
                _FIELD,
            )
        return text
