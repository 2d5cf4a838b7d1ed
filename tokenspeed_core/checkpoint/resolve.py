"""From what a user typed for a model to a directory, its configuration and its family. No tensor library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tokenspeed_core.api.models import Checkpoint, LoadFormat, ModelInfo, ModelSpec
from tokenspeed_core.checkpoint.hub import download
from tokenspeed_core.config import Config
from tokenspeed_core.config.build import called
from tokenspeed_core.errors import CheckpointError, ConfigError, suggest
from tokenspeed_core.files import read_json
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry, load_target

DEFAULT = "demo"  # the bundled checkpoint that is served where none is named
_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")
_NUMBERED = re.compile(r"-\d{5}-of-\d{5}\.\w+\Z")


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """A checkpoint on this machine and the family that serves it.

    `name` is what the user typed. `config` is config.json with the overrides merged in, `generation` is
    generation_config.json, empty where there is none. `files` are the names at the top of the repository or
    directory, those included that were not fetched.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    spec: ModelSpec
    info: ModelInfo
    files: tuple[str, ...]


def resolve_checkpoint(
    config: Config, catalog: Catalog, *, with_weights: bool = True
) -> ResolvedCheckpoint:
    """Find a model, downloading it if it is a hub id, and read what it says of itself.

    Without `with_weights` no weight file is downloaded: what remains tells all about a model but its answers.
    Raises CheckpointError, CapacityError or PluginError, in one line that says what to do.
    """
    name = config.model if config.model is not None else DEFAULT
    path, files = locate(name, config, catalog, with_weights)
    beside = path / "hf_quant_config.json"  # where some writers say what others say in config.json
    told = {"quantization_config": read_json(beside)} if beside.is_file() else {}
    own = merged({**told, **read_json(path / "config.json")}, config.hf_overrides)
    entry = find_family(own, catalog, path)
    spec = catalog.need(entry, ModelSpec)
    try:
        info = make(
            entry, spec.describe, lambda: load_target(spec.describe)(own), ModelInfo, (ValueError,)
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    generation = path / "generation_config.json"
    return ResolvedCheckpoint(
        name,
        path,
        own,
        read_json(generation) if generation.is_file() else {},
        spec,
        info,
        files,
    )


def locate(
    name: str, config: Config, catalog: Catalog, with_weights: bool
) -> tuple[Path, tuple[str, ...]]:
    """Return a checkpoint's directory and its files: a path, the name of a bundled one, or a hub id, in this order."""
    # pathlib's own expanduser raises for an unknown user.
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        _refuse_hub_settings(config, f"{name} is a local directory")
        return folder, _names(folder)
    if folder.is_file():
        raise CheckpointError(
            f"{name} is a file; give the directory with config.json and the weights"
        )
    bundled = catalog.names("checkpoints")
    if catalog.is_installed("checkpoints", name):
        _refuse_hub_settings(config, f"{name} is a bundled checkpoint")
        folder = Path(catalog.need(catalog.get("checkpoints", name), Checkpoint).path)
        return folder, _names(folder)
    if name == DEFAULT:
        raise CheckpointError(
            "no model is named and no demo is installed; name a directory or a hub id, or "
            "pip install tokenspeed-core[default]"
        )
    if not _REPO.match(name) or name.startswith("."):
        raise CheckpointError(f"there is no directory {name}{suggest(name, bundled)}")
    listed: list[str] = []

    def wanted(names: Sequence[str]) -> list[str]:
        listed.extend(name for name in names if "/" not in name)
        return wanted_files(listed, config.load_format, catalog, with_weights=with_weights)

    try:
        folder = download(name, config.revision, config.download_dir, wanted)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{suggest(name, bundled)}") from error
    return folder, tuple(listed) or _names(folder)


def _refuse_hub_settings(config: Config, why: str) -> None:
    """Raise ConfigError if a setting for downloads is given for a model that is not downloaded."""
    for name in ("revision", "download_dir"):
        value = getattr(config, name)
        if value is not None:
            setting, origin = called(name, config.origin(name))
            raise ConfigError(f"{setting} {value}{origin} has no effect: {why}; leave it out")


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with overrides: objects are merged key by key, null removes a key's value."""
    result = dict(config)
    for key, value in overrides.items():
        inner = result.get(key)
        result[key] = (
            merged(inner, value)
            if isinstance(inner, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result


def find_family(config: Mapping[str, Any], catalog: Catalog, path: Path) -> Entry:
    """Return the entry of the family of the first architecture that one is installed for. Raises CheckpointError."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise CheckpointError(
            f"{path}/config.json names no architectures; add the family's name with "
            '--hf-overrides \'{"architectures": ["…"]}\''
        )
    available = catalog.names("models")
    for architecture in sorted(
        named, key=lambda each: each not in available
    ):  # what is left says why it is of no use
        if catalog.is_installed("models", architecture):
            return catalog.get("models", architecture)
    raise CheckpointError(
        f"{path}: no installed family serves {', '.join(map(str, named))}{suggest(str(named[0]), available)}; "
        f"installed: {', '.join(available) or 'none'}; pip install a plugin for it"
    )


def choose_format(files: Sequence[str], load_format: str, catalog: Catalog) -> LoadFormat:
    """Return the load format of a name, for "auto" that of the files: safetensors first, then by name.

    Raises PluginError on an unknown name and CheckpointError if no installed format fits the files.
    """
    if load_format != "auto":
        return catalog.need(catalog.get("load_formats", load_format), LoadFormat)
    loaded = [catalog.load(entry, LoadFormat) for entry in catalog.entries("load_formats")]
    formats = {each.name: each for each in loaded if each is not None}
    for name in sorted(formats, key=lambda name: (name != "safetensors", name)):
        if _weights(files, formats[name]) and not formats[name].by_name_only:
            return formats[name]
    unasked = [
        name for name, each in formats.items() if each.by_name_only and _weights(files, each)
    ]
    if unasked:
        raise CheckpointError(
            f"the only weights are pickles, which are not opened unasked; "
            f"if you trust where they come from, give --load-format {unasked[0]}"
        )
    raise CheckpointError(
        f"there are no weight files that auto knows; --load-format is one of: "
        f"{', '.join(sorted(formats)) or 'none installed'}"
    )


def wanted_files(
    names: Sequence[str], load_format: str, catalog: Catalog, *, with_weights: bool = True
) -> list[str]:
    """Return the files of a repository to download: those at the top, with weights in one format only.

    Where an index tells of numbered shards, other weight files are second copies and are left out. A format is
    looked for also where no weights are wanted, so that its lack is told as early.
    """
    top = [name for name in names if "/" not in name]
    weights = _weights(top, choose_format(top, load_format, catalog))
    if any(name.endswith(".index.json") for name in weights):
        weights = [
            name for name in weights if name.endswith(".index.json") or _NUMBERED.search(name)
        ]
    side = [name for name in top if any(fnmatch(name, pattern) for pattern in _SIDE_FILES)]
    return [
        *(name for name in side if not name.endswith(".index.json")),
        *(weights if with_weights else ()),
    ]


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(each.name for each in folder.iterdir())) if folder.is_dir() else ()


def _weights(names: Iterable[str], load_format: LoadFormat) -> list[str]:
    """Return the weight files of a format, its index first where it has one."""
    found = [
        name for name in names if any(fnmatch(name, pattern) for pattern in load_format.detect)
    ]
    return sorted(found, key=lambda name: (not name.endswith(".index.json"), name))
