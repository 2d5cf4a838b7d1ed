"""Finds the directory, configuration and family of a model by its name. Imports no tensor library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

from tokenspeed_core.api.models import (
    ANY_ARCHITECTURE,
    Checkpoint,
    LoadFormat,
    ModelInfo,
    ModelSpec,
)
from tokenspeed_core.checkpoint.hub import download
from tokenspeed_core.config import Config
from tokenspeed_core.config.build import called
from tokenspeed_core.errors import CheckpointError, ConfigError, suggest
from tokenspeed_core.files import read_json
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.targets import load_target

DEFAULT = "demo"  # the bundled checkpoint
FORMAT_FLAG, DRAFT_FORMAT_FLAG = "--load-format", "--speculative-draft-load-format"
_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# The source with the split pattern of tiktoken.model, which is read, not run.
_TIKTOKEN_SOURCES = "tokenization_*.py"
_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")
_NUMBERED = re.compile(r"-\d{5}-of-\d{5}\.\w+\Z")


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """A checkpoint on this machine and the model family that serves it."""

    name: str  # as the user gave it
    path: Path
    config: Mapping[str, Any]  # config.json with --hf-overrides merged in
    generation: Mapping[str, Any]  # generation_config.json, or empty
    spec: ModelSpec
    info: ModelInfo
    files: tuple[str, ...]  # at the top of the repository or directory, downloaded or not


def resolve_checkpoint(
    config: Config, catalog: Catalog, *, with_weights: bool = True
) -> ResolvedCheckpoint:
    """Find a model, downloading it if it is a hub id, and read its configuration.

    Without `with_weights`, weight files are not downloaded. Raises CheckpointError, CapacityError,
    ConfigError or PluginError.
    """
    name = config.model if config.model is not None else DEFAULT
    path, files = locate(name, config, catalog, with_weights, _hub_settings(config, catalog))
    model_config = read_json(path / "config.json")
    # ModelOpt writes the quantization settings to a separate file.
    quantization = path / "hf_quant_config.json"
    if quantization.is_file():
        model_config.setdefault("quantization_config", read_json(quantization))
    model_config = merged(model_config, config.hf_overrides)
    model_config.pop("trust_remote_code", None)
    entry = find_family(model_config, catalog, path)
    spec = catalog.need(entry, ModelSpec)
    if config.trust_remote_code:
        if not spec.runs_remote_code:
            raise ConfigError(
                f"--trust-remote-code has no effect: {entry} does not run code of model repositories; remove the flag"
            )
        model_config["trust_remote_code"] = str(path)
    info = describe(entry, spec, model_config, path)
    check_cache_groups(info)
    generation = path / "generation_config.json"
    return ResolvedCheckpoint(
        name,
        path,
        model_config,
        read_json(generation) if generation.is_file() else {},
        spec,
        info,
        files,
    )


def describe(entry: Entry, spec: ModelSpec, config: Mapping[str, Any], path: Path) -> ModelInfo:
    """Return the properties of a checkpoint. Raises CheckpointError if its family does not support them."""
    target = spec.describe
    try:
        return make(entry, target, lambda: load_target(target)(config), ModelInfo, (ValueError,))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_cache_groups(info: ModelInfo) -> None:
    """Raise CheckpointError unless cache groups have different names and keep values for each token."""
    if not info.cache_groups:
        raise CheckpointError(
            f"{info.architecture}: `describe` declares no cache group. Declare at least one, such as FullAttention."
        )
    names: set[str] = set()
    for group in info.cache_groups:
        what = f"{info.architecture}: cache group {group.name!r}"
        if group.name in names:
            raise CheckpointError(f"{what} is declared twice. Give each group a different name.")
        names.add(group.name)
        parts = getattr(group, "parts", ())  # a plugin's class may be of another kind
        if group.num_layers < 1 or not parts or min(prod(part.shape) for part in parts) < 1:
            raise CheckpointError(
                f"{what} ({type(group).__name__}) stores no values per token. Declare `num_layers` and `parts`; "
                "recurrent state of a fixed size per sequence is not supported."
            )


def locate(
    name: str,
    config: Config,
    catalog: Catalog,
    with_weights: bool,
    hub_settings: Sequence[str] = (),
    *,
    format_flag: str = FORMAT_FLAG,
) -> tuple[Path, tuple[str, ...]]:
    """Return the directory of a checkpoint and its files. A name is a path, a bundled checkpoint, or a hub id.

    `format_flag` is the flag that messages name for the format of its weights.
    Raises ConfigError if `hub_settings` are given and the name is not a hub id.
    """
    folder = local_folder(name, catalog)
    if folder is not None:
        _refuse(hub_settings, config, f"{name} is not downloaded")
        return folder, names_in(folder)
    if name == DEFAULT:
        raise CheckpointError(
            "no model is given and the demo is not installed; give a directory or a hub id, or run "
            "`pip install 'tokenspeed-core[default]'`"
        )
    bundled = catalog.names("checkpoints")
    if not _REPO.match(name) or name.startswith("."):
        raise CheckpointError(f"no such directory: {name}{suggest(name, bundled)}")
    listed: list[str] = []

    def wanted(names: Sequence[str]) -> list[str]:
        listed.extend(each for each in names if "/" not in each)
        found = wanted_files(
            listed, config.load_format, catalog, name, format_flag, with_weights=with_weights
        )
        code = [each for each in listed if config.trust_remote_code and each.endswith(".py")]
        return list(dict.fromkeys([*found, *code]))

    try:
        folder = download(name, config.revision, config.download_dir, wanted)
    except CheckpointError as error:
        form = "" if "/" in name else "; most repo ids have the form OWNER/NAME"
        raise CheckpointError(f"{error}{suggest(name, bundled) or form}") from error
    return folder, tuple(listed) or names_in(folder)


def local_folder(name: str, catalog: Catalog) -> Path | None:
    """Return the directory for a name, or None if the name may be a hub id. Raises CheckpointError, PluginError."""
    # Path.expanduser raises for an unknown user.
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(
            f"{name} is a file; give the directory with config.json and the weights"
            + ("; GGUF is not supported" if folder.suffix == ".gguf" else "")
        )
    if catalog.is_installed("checkpoints", name):
        return Path(catalog.need(catalog.get("checkpoints", name), Checkpoint).path)
    return None


def _hub_settings(config: Config, catalog: Catalog) -> tuple[str, ...]:
    """Return the settings that have no effect if the target model is not downloaded."""
    if config.origin("model") == "auto":  # another process downloaded it to this directory
        return ()
    drafter = config.speculation()
    draft = None if drafter is None else drafter.draft_model
    is_downloaded = draft is not None and local_folder(draft, catalog) is None
    return ("revision",) if is_downloaded else ("revision", "download_dir")


def _refuse(names: Sequence[str], config: Config, why: str) -> None:
    """Raise ConfigError if one of these settings is given."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            setting, origin = called(name, config.origin(name))
            raise ConfigError(f"{setting} {value}{origin} has no effect: {why}; remove it")


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with overrides. Nested objects are merged key by key."""
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
    """Return the family of the first architecture for which one is installed, else the one for any architecture.

    Raises CheckpointError.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise CheckpointError(
            f"{path}/config.json has no architectures; give one with "
            '--hf-overrides \'{"architectures": ["…"]}\''
        )
    if not all(isinstance(each, str) for each in named):
        raise CheckpointError(
            f"{path}/config.json: architectures is {named!r:.300}, expected a list of names"
        )
    available = catalog.names("models")
    # `is_installed` raises for a plugin that failed to load, so available architectures come first.
    for architecture in sorted(named, key=lambda each: each not in available):
        if catalog.is_installed("models", architecture):
            return catalog.get("models", architecture)
    if ANY_ARCHITECTURE in available:
        return catalog.get("models", ANY_ARCHITECTURE)
    # Most names end in ForCausalLM, so that only very similar ones are probably typos.
    near = get_close_matches(str(named[0]), available, n=1, cutoff=0.9)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise CheckpointError(
        f"{path}: no installed model family supports {', '.join(map(str, named))}"
        f"{hint}; installed: {', '.join(available) or 'none'}. Most models of Hugging Face transformers run with "
        "tokenspeed-models-transformers: `pip install tokenspeed-models-transformers`"
    )


def choose_format(
    files: Sequence[str],
    load_format: str,
    catalog: Catalog,
    source: str | Path,
    flag: str = FORMAT_FLAG,
) -> LoadFormat:
    """Return a load format by name, or for "auto" the first one that matches the files.

    safetensors comes first, then the order is alphabetical. Messages name `source`, the folder or the repository of the
    files, and `flag`, which sets the format. Raises PluginError for an unknown name and CheckpointError if no installed
    format matches.
    """
    if load_format != "auto":
        return catalog.need(catalog.get("load_formats", load_format), LoadFormat)
    loaded = [catalog.load(entry, LoadFormat) for entry in catalog.entries("load_formats")]
    formats = {each.name: each for each in loaded if each is not None}
    for name in sorted(formats, key=lambda name: (name != "safetensors", name)):
        if weight_files(files, formats[name]) and not formats[name].by_name_only:
            return formats[name]
    by_name_only = [
        name for name, each in formats.items() if each.by_name_only and weight_files(files, each)
    ]
    if by_name_only:
        raise CheckpointError(
            f"{source}: the only weights are pickle files, which may contain code; "
            f"if you trust their source, add {flag} {by_name_only[0]}"
        )
    raise CheckpointError(
        f"{source}: no weight files of a known format; installed for {flag}: "
        f"{', '.join(sorted(formats)) or 'none'}"
    )


def wanted_files(
    names: Sequence[str],
    load_format: str,
    catalog: Catalog,
    source: str,
    flag: str = FORMAT_FLAG,
    *,
    with_weights: bool = True,
) -> list[str]:
    """Return the files of the repository `source` to download: those at the top, with weights in one format.

    If there is an index of numbered shards, other weight files are copies and are left out. Raises the errors of
    `choose_format`, also without weights.
    """
    top = [name for name in names if "/" not in name]
    weights = weight_files(top, choose_format(top, load_format, catalog, source, flag))
    if any(name.endswith(".index.json") for name in weights):
        weights = [
            name for name in weights if name.endswith(".index.json") or _NUMBERED.search(name)
        ]
    has_tiktoken = "tiktoken.model" in top and "tokenizer.json" not in top
    patterns = (*_SIDE_FILES, _TIKTOKEN_SOURCES) if has_tiktoken else _SIDE_FILES
    side = [name for name in top if any(fnmatch(name, pattern) for pattern in patterns)]
    return [
        *(name for name in side if not name.endswith(".index.json")),
        *(weights if with_weights else ()),
    ]


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the names of a directory's files, none if it does not exist."""
    return tuple(sorted(each.name for each in folder.iterdir())) if folder.is_dir() else ()


def weight_files(names: Iterable[str], load_format: LoadFormat) -> list[str]:
    """Return the weight files of a format; an index comes first."""
    found = [
        name for name in names if any(fnmatch(name, pattern) for pattern in load_format.detect)
    ]
    return sorted(found, key=lambda name: (not name.endswith(".index.json"), name))
