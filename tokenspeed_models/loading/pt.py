"""Reads PyTorch checkpoints with `weights_only=True`, which unpickles only tensors."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tokenspeed_core.api import DraftModel, Model
from tokenspeed_models.loading.shards import FileKind, find_shards

_FILES = FileKind("pytorch_model.bin", ("pytorch_model*.bin", "*.pt", "*.pth"))


def read_pt(
    path: str, model: Model | DraftModel, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint, shard by shard; zip archives are memory-mapped.

    Raises ValueError if a shard is missing, damaged, or not a flat mapping of names to tensors.
    """
    files = find_shards(path, _FILES)
    done, total = 0, sum(file.stat().st_size for file in files)
    report(done, total)
    for file in files:
        weights = _load(file)
        while weights:
            name, tensor = weights.popitem()
            yield name, tensor
            done += tensor.nbytes
            report(min(done, total), total)
    report(total, total)


def _load(file: Path) -> dict[str, torch.Tensor]:
    """Load one file. Files of torch before 1.6 are not zip archives and cannot be memory-mapped."""
    try:
        content = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{file} cannot be read: {reason}. The file is damaged, or contains more than tensors. Use "
            "safetensors files instead."
        ) from error
    if not isinstance(content, Mapping) or any(
        not torch.is_tensor(item) for item in content.values()
    ):
        raise ValueError(
            f"{file} is not a flat mapping of names to tensors. Use safetensors files instead."
        )
    return dict(content)
