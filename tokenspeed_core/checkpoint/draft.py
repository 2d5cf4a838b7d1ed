"""Finds the checkpoint of a draft model. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api.drafters import DraftCheckpoint
from tokenspeed_core.api.models import ANY_ARCHITECTURE, ModelSpec
from tokenspeed_core.checkpoint.resolve import (
    DRAFT_FORMAT_FLAG,
    choose_format,
    describe,
    local_folder,
    locate,
    names_in,
)
from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.files import read_json
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry


def resolve_draft(
    name: str, config: Config, catalog: Catalog, *, with_weights: bool = True
) -> DraftCheckpoint:
    """Find the checkpoint of a draft model, downloading it if it is a hub id. Raises as `resolve_checkpoint` does."""
    wanted = config.draft_load_format
    if wanted != "auto":  # an unknown name fails now, not when the weights are loaded
        choose_format((), wanted, catalog, name)
    # --revision is the target's.
    draft = config.resolved(revision=None, load_format=wanted)
    path, _ = locate(name, draft, catalog, with_weights, format_flag=DRAFT_FORMAT_FLAG)
    json = read_json(path / "config.json")
    if json.get("quantization_config"):
        raise CheckpointError(
            f"{path}: quantized draft models are not supported; use an unquantized checkpoint"
        )
    spec, info = None, None
    entry = _family(json.get("architectures"), catalog)
    if entry is not None:
        spec = catalog.need(entry, ModelSpec)
        info = describe(entry, spec, json, path)
    return DraftCheckpoint(path, json, spec, info)


def check_draft_weights(config: Config, catalog: Catalog) -> None:
    """Raise CheckpointError if the directory of a draft model has no weight files.

    For a model of the hub, `resolve_draft` looks for them among the names of its files.
    """
    wanted = config.speculation()
    if wanted is None or wanted.draft_model is None:
        return
    path = local_folder(wanted.draft_model, catalog)
    if path is not None:
        load_format = wanted.load_format or config.load_format
        choose_format(names_in(path), load_format, catalog, path, DRAFT_FORMAT_FLAG)


def _family(named: object, catalog: Catalog) -> Entry | None:
    """Return the family of the first architecture for which one is installed."""
    for architecture in named if isinstance(named, list) else ():
        if architecture != ANY_ARCHITECTURE and catalog.is_installed("models", architecture):
            return catalog.get("models", architecture)
    return None
