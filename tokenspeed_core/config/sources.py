"""The sources of values. Flags win over the environment, which wins over a YAML file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed_core.config.build import build, unknown
from tokenspeed_core.config.schema import Config, flag, metadata
from tokenspeed_core.errors import ConfigError

PREFIX = "TOKENSPEED_"
# Read by the plugin selection.
OTHERS = frozenset({"TOKENSPEED_PLUGINS"})
Values = dict[str, tuple[Any, str]]
logger = logging.getLogger("tokenspeed.config")


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> Config:
    """Build the configuration from flags, the environment and a YAML file; the first with a value wins.

    `flags` are keyed by setting (`port`) or setting and key (`attention_backend.decode`). A setting also
    overrides the keys of weaker sources. Raises ConfigError with the setting, its value and its origin.
    """
    values = from_file(file) if file is not None else {}
    for source in (
        from_environment(environ),
        {name: (value, flag(name)) for name, value in flags.items()},
    ):
        weaker = {name for name in values if {name, name.partition(".")[0]} & source.keys()}
        values = {name: each for name, each in values.items() if name not in weaker} | source
    return build(_join_narrowed(values))


def from_environment(environ: Mapping[str, str]) -> Values:
    """Read `TOKENSPEED_<SETTING>` and `TOKENSPEED_<SETTING>__<KEY>`.

    An empty variable counts as unset. An unknown one is ignored with a warning, since other programs may
    use the prefix too.
    """
    values: Values = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OTHERS or not environ[variable]:
            continue
        name = variable.removeprefix(PREFIX).lower().replace("__", ".")
        if name.partition(".")[0] in Config.model_fields:
            values[name] = (environ[variable], variable)
        else:
            logger.warning("ignored: %s", unknown(name, variable))
    return values


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings, for a child process that receives a configuration."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name in OTHERS
    }


def from_file(path: str) -> Values:
    """Read settings from a YAML file, with keys spelled as flags or as keywords. Raises ConfigError."""
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"--config {path}: must be a mapping of settings, found a {type(data).__name__}"
        )
    values: Values = {}
    for key, value in data.items():
        name = str(key).removeprefix("--").replace("-", "_")
        for part, each in _parts(name, value).items():
            if part in values:
                raise ConfigError(f"--config {path}: {flag(part)} is given twice")
            values[part] = (each, path)
    return values


def _parts(name: str, value: Any) -> dict[str, Any]:
    """Split a mapping with keys into `setting.key` values; "default" is the setting's own."""
    if (
        not isinstance(value, Mapping)
        or name not in Config.model_fields
        or not metadata(name)["narrow"]
    ):
        return {name: value}
    return {name if key == "default" else f"{name}.{key}": each for key, each in value.items()}


def _join_narrowed(values: Values) -> Values:
    """Merge `setting.key` values into their setting; its origin then lists all sources."""
    joined: Values = {name: value for name, value in values.items() if "." not in name}
    for name in [name for name in values if "." in name]:
        value, origin = values[name]
        setting, _, key = name.partition(".")
        if setting not in Config.model_fields or key not in metadata(setting)["narrow"]:
            raise ConfigError(unknown(name, origin))
        base, first = joined.get(setting, ({}, origin))
        parts = base if isinstance(base, Mapping) else {"default": base}
        joined[setting] = (
            {**parts, key: value},
            first if origin in first.split(", ") else f"{first}, {origin}",
        )
    return joined
