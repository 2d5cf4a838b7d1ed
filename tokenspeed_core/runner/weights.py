"""Finding the way to read a checkpoint, and reading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.kernels.spec import load_target
from tokenspeed_core.models import LoadFormat, Model, WeightReader
from tokenspeed_core.plugins.catalog import Catalog

Progress = Callable[[str, int, int], None]


def load_weights(model: Model, path: str, load_format: str, catalog: Catalog, progress: Progress) -> None:
    """Fill a model. `load_format` "auto" takes the format whose files are there. Raises CheckpointError."""
    found = find_format(path, load_format, catalog)
    reader: WeightReader = load_target(found.load)
    try:
        model.load_weights(reader(path, model, lambda done, total: progress("weights", done, total)))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def find_format(path: str, name: str, catalog: Catalog) -> LoadFormat:
    """Return the load format of that name or, for "auto", the one whose files a checkpoint directory has."""
    if name != "auto":
        named = catalog.load(catalog.get("load_formats", name), LoadFormat, required=True)
        assert named is not None, "a required entry is loaded or raises"
        return named
    formats = [catalog.load(entry, LoadFormat) for entry in catalog.entries("load_formats")]
    fitting = [each for each in formats if each is not None and _has_files(path, each)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(each.name for each in fitting or formats if each is not None)
    if not fitting:
        raise CheckpointError(f"{path} holds no weights that auto knows; --load-format is one of: {names}")
    raise CheckpointError(f"{path} holds weights in several formats; give --load-format one of: {names}")


def _has_files(path: str, load_format: LoadFormat) -> bool:
    return any(any(Path(path).glob(pattern)) for pattern in load_format.detect)
