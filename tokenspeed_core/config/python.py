"""The configuration of `LLM` and `AsyncLLM`, from their keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.config.schema import Config
from tokenspeed_core.config.server_settings import is_server_only
from tokenspeed_core.errors import ConfigError


def read_keywords(model: str | None, settings: Mapping[str, Any]) -> Config:
    """Return the configuration. Raises ConfigError, also for settings of the server."""
    for name in settings:
        if is_server_only(name):
            raise ConfigError(f"{name} configures the HTTP server; remove it")
    return Config.from_keywords(**({} if model is None else {"model": model}), **settings)
