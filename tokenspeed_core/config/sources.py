"""Reads settings from flags, environment variables and a YAML file; the first of these with a value wins."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tokenspeed_core.config.build import build, called, unknown
from tokenspeed_core.config.flag_aliases import alias_hint, why_not_needed
from tokenspeed_core.config.schema import C, Config
from tokenspeed_core.config.settings import flag
from tokenspeed_core.errors import ConfigError

PREFIX = "TOKENSPEED_"
# Read by the plugin selection.
OTHERS = frozenset({"TOKENSPEED_PLUGINS"})
# The path of the YAML file, as --config.
CONFIG_VARIABLE = "TOKENSPEED_CONFIG"
MAX_FILE_CHARS = 2**20  # of a YAML file
Values = dict[str, tuple[Any, str]]
logger = logging.getLogger("tokenspeed.config")


def load(
    kind: type[C], flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None
) -> C:
    """Build a configuration of that kind from flags, the environment and a YAML file; the first with a value wins.

    `flags` are keyed by setting (`port`) or setting and key (`attention_backend.decode`). A setting also
    replaces its keys from sources of lower precedence. Raises ConfigError with the setting, its value and its origin.
    """
    values = _configured(kind, environ, file)
    for source in (
        from_environment(kind, environ),
        {name: (value, flag(name)) for name, value in flags.items()},
    ):
        weaker = {name for name in values if {name, name.partition(".")[0]} & source.keys()}
        values = {name: each for name, each in values.items() if name not in weaker} | source
    return build(kind, _join_narrowed(kind, _without_unneeded(values)))


def _configured(kind: type[Config], environ: Mapping[str, str], file: str | None) -> Values:
    """Read the file of --config, or of TOKENSPEED_CONFIG without that flag."""
    if file is not None:
        return from_file(kind, file)
    path = environ.get(CONFIG_VARIABLE)
    return from_file(kind, path, CONFIG_VARIABLE) if path else {}


def _without_unneeded(values: Values) -> Values:
    """Remove settings of other engines that are not needed here, and log a message for each."""
    kept: Values = {}
    for name, (value, origin) in values.items():
        why = why_not_needed(name)
        if why is None or value in (False, "false"):
            kept[name] = value, origin
        else:
            shown, where = called(name, origin)
            logger.warning("%s%s has no effect here: %s", shown, where, why)
    return kept


def from_environment(kind: type[Config], environ: Mapping[str, str]) -> Values:
    """Read `TOKENSPEED_<SETTING>` and `TOKENSPEED_<SETTING>__<KEY>`.

    An empty variable counts as unset, except for a secret. An unknown one is ignored with a warning,
    since other programs may use the prefix too. Raises ConfigError for an empty or misspelled secret,
    since the server would otherwise run without it.
    """
    secrets = [
        PREFIX + name.upper() for name in kind.model_fields if kind.metadata(name)["is_secret"]
    ]
    values: Values = {}
    for variable in sorted(environ):
        is_read = variable in OTHERS or variable == CONFIG_VARIABLE
        if not variable.startswith(PREFIX) or is_read:
            continue
        if variable in secrets and not environ[variable].strip(", "):
            raise ConfigError(f"{variable} is empty. Set a value, or unset the variable.")
        if not environ[variable]:
            continue
        name = kind.full_name(variable.removeprefix(PREFIX).lower().replace("__", "."))
        if name.partition(".")[0] in kind.model_fields:
            values[name] = (environ[variable], variable)
        else:
            for secret in get_close_matches(variable, secrets, cutoff=0.85):
                raise ConfigError(f"{variable} is not a setting. Did you mean {secret}?")
            logger.warning("ignored: %s", _unknown_variable(kind, name, variable))
    return values


def _unknown_variable(kind: type[Config], name: str, variable: str) -> str:
    """Return a message about an unknown variable, with the nearest one."""
    near = get_close_matches(name, kind.model_fields, n=1, cutoff=0.75)
    if alias_hint(name) is not None or not near:
        return unknown(kind, name, variable)
    return f"{variable}: no such variable; did you mean {PREFIX}{near[0].upper()}?"


def key_for_server(keys: str | None = None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the API key to send to a running server: the first of `keys`, else of TOKENSPEED_API_KEY.

    The setting `api_key` may list several keys, separated by commas.
    """
    first, _, _ = (keys or environ.get("TOKENSPEED_API_KEY", "")).partition(",")
    return first.strip() or None


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings, for a child process that receives a configuration."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name in OTHERS
    }


def from_file(kind: type[Config], path: str, source: str = "--config") -> Values:
    """Read settings from a YAML file, with keys spelled as flags or as keywords.

    Raises ConfigError that says by which flag or variable the file was chosen.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_CHARS + 1)
        if len(text) > MAX_FILE_CHARS:
            raise ConfigError(f"{source} {path}: has more than {MAX_FILE_CHARS} characters")
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{source} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} {path}: not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source} {path}: must be a mapping of settings, found a {type(data).__name__}"
        )
    values: Values = {}
    for key, value in data.items():
        name = kind.full_name(str(key).removeprefix("--").replace("-", "_"))
        for part, each in _parts(kind, name, value).items():
            if part in values:
                raise ConfigError(f"{source} {path}: {flag(part)} is given twice")
            values[part] = (each, path)
    return values


def _parts(kind: type[Config], name: str, value: Any) -> dict[str, Any]:
    """Split a mapping with keys into `setting.key` values; "default" is the setting's own."""
    if (
        not isinstance(value, Mapping)
        or name not in kind.model_fields
        or not kind.metadata(name)["narrow"]
    ):
        return {name: value}
    return {name if key == "default" else f"{name}.{key}": each for key, each in value.items()}


def _join_narrowed(kind: type[Config], values: Values) -> Values:
    """Merge `setting.key` values into their setting; its origin then lists all sources."""
    joined: Values = {name: value for name, value in values.items() if "." not in name}
    for name in [name for name in values if "." in name]:
        value, origin = values[name]
        setting, _, key = name.partition(".")
        if setting not in kind.model_fields or key not in kind.metadata(setting)["narrow"]:
            raise ConfigError(unknown(kind, name, origin))
        base, first = joined.get(setting, ({}, origin))
        parts = base if isinstance(base, Mapping) else {"default": base}
        joined[setting] = (
            {**parts, key: value},
            first if origin in first.split(", ") else f"{first}, {origin}",
        )
    return joined
