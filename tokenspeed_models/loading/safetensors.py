"""Reads safetensors files, memory-mapped: the bytes of a tensor are read when it is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed_core.api import DraftModel, Model
from tokenspeed_models.loading.safetensors_header import TensorEntry, read_header
from tokenspeed_models.loading.shards import SAFETENSORS, find_shards

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(
    path: str, model: Model | DraftModel, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint, shard by shard, as views of mapped files.

    A tensor that is not copied is not read, and neither is the rest of one of which a part is copied. Raises ValueError
    if a shard is missing, truncated or not a safetensors file.
    """
    files = find_shards(path, SAFETENSORS)
    done, total = 0, sum(file.stat().st_size for file in files)
    report(done, total)
    for file in files:  # before any of them is read
        try:
            with safe_open(file, framework="pt"):
                pass  # the header fits the file
        except SafetensorError as error:
            raise ValueError(
                f"{file} cannot be read: {error}. The file is truncated or damaged. Copy or download it again."
            ) from error
    for file in files:
        mapped: Any = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
        for entry in read_header(file):
            yield entry.name, _view(mapped, entry)
            done += entry.end - entry.start
            report(done, total)
    report(total, total)


def _view(mapped: Any, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor of a mapped file, an UntypedStorage, at any alignment.

    `safe_open` would read its first page, and more ahead.
    """
    if entry.dtype not in _DTYPES:
        raise ValueError(
            f"{entry.name} is {entry.dtype}. Supported: {', '.join(_DTYPES)}. Use another checkpoint."
        )
    tensor = torch.empty(0, dtype=_DTYPES[entry.dtype])
    return tensor.set_(mapped[entry.start : entry.end]).view(entry.shape)
