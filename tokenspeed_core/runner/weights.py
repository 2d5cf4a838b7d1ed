"""Reading a checkpoint into a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenspeed_core.checkpoint import choose_format
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.kernels.spec import load_target
from tokenspeed_core.models import Model, WeightReader
from tokenspeed_core.plugins.catalog import Catalog

Progress = Callable[[str, int, int], None]


def load_weights(model: Model, path: str, load_format: str, catalog: Catalog, progress: Progress) -> None:
    """Fill a model. `load_format` "auto" takes the format whose files are there. Raises CheckpointError."""
    files = [file.name for file in Path(path).iterdir()] if load_format == "auto" else []
    reader: WeightReader = load_target(choose_format(files, load_format, catalog).load)
    try:
        model.load_weights(reader(path, model, lambda done, total: progress("weights", done, total)))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
