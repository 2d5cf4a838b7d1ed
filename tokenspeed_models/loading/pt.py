"""Reads PyTorch checkpoints, unpickling nothing but tensors (`weights_only`)."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tokenspeed_core.api import Model
from tokenspeed_models.loading.shards import FileKind, find_shards

_FILES = FileKind("pytorch_model.bin", ("pytorch_model*.bin", "*.pt", "*.pth"))


def read_pt(
    path: str, model: Model, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint, shard by shard; zip archives are memory-mapped.

    Raises ValueError if a shard is missing, damaged, or holds anything but a flat mapping of tensors.
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
    """Open one file. The format of before torch 1.6 is no zip archive, and cannot be mapped."""
    try:
        content = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{file} cannot be read ({reason}): it is damaged, or holds more than tensors; "
            "use safetensors files instead"
        ) from error
    if not isinstance(content, Mapping) or any(
        not torch.is_tensor(item) for item in content.values()
    ):
        raise ValueError(
            f"{file} holds no flat mapping of names to tensors; use safetensors files instead"
        )
    return dict(content)
