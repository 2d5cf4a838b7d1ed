"""Compares the model files of several nodes, which may have them in different folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenspeed_core.checkpoint.resolve import (
    DRAFT_FORMAT_FLAG,
    FORMAT_FLAG,
    choose_format,
    weight_files,
)
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved

_SAMPLE_BYTES = 4096
_MAX_NAMES = 3  # in a message


def digest_models(resolved: Resolved, catalog: Catalog) -> dict[str, str]:
    """Return a digest of each configuration and weight file of the model and the draft model; empty for one node.

    Raises CheckpointError for a file that cannot be read, and for weights of an unknown format.
    """
    config, folder, draft = resolved.config, resolved.checkpoint.path, resolved.draft_model
    if config.nnodes == 1:
        return {}
    files = _files(folder, config.load_format, catalog, FORMAT_FLAG)
    digests = {file.name: _digest(file) for file in files}
    if draft is not None and draft.weights != folder:
        files = _files(draft.weights, config.draft_load_format, catalog, DRAFT_FORMAT_FLAG)
        digests |= {f"{file.name} of the draft model": _digest(file) for file in files}
    return digests


def find_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the names of the files with different digests, "" if there are none.

    Files that one node lacks are not compared: loading fails if they are needed.
    """
    names = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _files(folder: Path, load_format: str, catalog: Catalog, flag: str) -> Iterator[Path]:
    names = sorted(each.name for each in folder.iterdir())
    weights = weight_files(names, choose_format(names, load_format, catalog, folder, flag))
    for name in sorted({"config.json", *weights} & set(names)):
        yield folder / name


def _digest(file: Path) -> str:
    """Return a digest of the size and the last bytes of a file. Reading all weights would take minutes."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _SAMPLE_BYTES))
            sample = opened.read()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    return hashlib.sha256(b"%d:" % size + sample).hexdigest()[:16]
