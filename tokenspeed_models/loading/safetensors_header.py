"""The header of a safetensors file, which says where its tensors are. Imports no tensor library."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: its dtype, such as "BF16", its shape, and its range of bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: Path) -> list[TensorEntry]:
    """Return the tensors of a file in the order of their bytes. Raises ValueError if the header is damaged."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        entries = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            entries.append(TensorEntry(name, entry["dtype"], tuple(entry["shape"]), start, end))
    except (
        struct.error,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise ValueError(
            f"{file} cannot be read: {error}. The file is truncated or damaged. Copy or download it again."
        ) from error
    return sorted(entries, key=lambda entry: entry.start)
