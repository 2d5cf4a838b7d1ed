"""Reads safetensors files, memory-mapped: the bytes of a tensor are read when it is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed_core.api import DraftModel, Model
from tokenspeed_models.loading.shards import SAFETENSORS, find_shards


def read_safetensors(
    path: str, model: Model | DraftModel, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint, shard by shard, as views of mapped files.

    Raises ValueError if a shard is missing, truncated or not a safetensors file.
    """
    files = find_shards(path, SAFETENSORS)
    done, total = 0, sum(file.stat().st_size for file in files)
    report(done, total)
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 (safe_open is not iterable)
                    tensor = shard.get_tensor(name)
                    yield name, tensor
                    done += tensor.nbytes
                    report(done, total)
        except SafetensorError as error:
            raise ValueError(
                f"{file} cannot be read: {error}. The file is truncated or damaged. Copy or download it "
                "again."
            ) from error
    report(total, total)
