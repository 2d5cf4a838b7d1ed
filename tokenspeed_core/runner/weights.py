"""Finding the way to read a checkpoint, and reading it."""

from __future__ import annotations

import os
from collections.abc import Callable

from tokenspeed_core.checkpoint import choose_format
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.kernels.spec import load_target
from tokenspeed_core.models import Model, WeightReader
from tokenspeed_core.plugins.catalog import Catalog

Progress = Callable[[str, int, int], None]


def load_weights(model: Model, path: str, load_format: str, catalog: Catalog, progress: Progress) -> None:
    """Fill a model. `load_format` "auto" takes the format whose files are there. Raises CheckpointError."""
    names = sorted(os.listdir(path)) if load_format == "auto" else []
    found = choose_format(names, load_format, catalog)
    reader: WeightReader = load_target(found.load)
    try:
        model.load_weights(reader(path, model, lambda done, total: progress("weights", done, total)))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
