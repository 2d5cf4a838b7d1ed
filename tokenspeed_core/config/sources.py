"""Where values come from: flags, then the environment, then a YAML file, then the defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed_core.config.build import build, unknown
from tokenspeed_core.config.schema import Config, flag, metadata
from tokenspeed_core.errors import ConfigError

PREFIX = "TOKENSPEED_"
OTHERS = frozenset({"TOKENSPEED_PLUGINS"})  # read by the plugin selection
Values = dict[str, tuple[Any, str]]
logger = logging.getLogger("tokenspeed.config")


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None = None) -> Config:
    """Build the configuration of what was typed, the environment and a file, the first that has a value.

    `flags` are keyed by setting (`port`) or narrowed setting (`attention_backend.decode`). A setting that a source
    has goes before what later sources narrow it to. Raises ConfigError, which names the setting, its value, the
    bound that it broke and where it came from.
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
    """Read `TOKENSPEED_<SETTING>`, and `TOKENSPEED_<SETTING>__<KEY>` where it can be narrowed.

    An empty variable is an unset one. A variable of our prefix that is no setting is ignored with a
    warning: other programs use the prefix too.
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
    """Return the environment for a child that is given its settings in another way."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(PREFIX) or name in OTHERS
    }


def from_file(path: str) -> Values:
    """Read a YAML mapping of settings, spelled as flags or as keywords. Raises ConfigError."""
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
                raise ConfigError(f"--config {path}: {flag(part)} stands there twice")
            values[part] = (each, path)
    return values


def _parts(name: str, value: Any) -> dict[str, Any]:
    """Spell a mapping of what may be narrowed as `setting.key` values, its default as the setting's own."""
    if (
        not isinstance(value, Mapping)
        or name not in Config.model_fields
        or not metadata(name)["narrow"]
    ):
        return {name: value}
    return {name if key == "default" else f"{name}.{key}": each for key, each in value.items()}


def _join_narrowed(values: Values) -> Values:
    """Gather `setting.key` values under their setting, which then comes from all their sources."""
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
