"""The scales of an FP8 KV cache that a checkpoint holds. Reads the headers of its files; imports no tensor library."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from tokenspeed_core.api import KVScale
from tokenspeed_models.loading.safetensors_header import read_header
from tokenspeed_models.loading.shards import SAFETENSORS, find_shards

# llm-compressor and ModelOpt write k_scale and v_scale, AutoFP8 wrote one kv_scale, and Quark writes output_scale.
_NAME = re.compile(
    r"(?:.*?\.)?(?P<layer>\d+)\.(?:.*\.)?"
    r"(?:(?P<part>[kv]|kv)_scale|(?P<projection>[kv])_proj\.output_scale)\Z"
)
_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<H"}


def read_kv_scales(path: str) -> Mapping[int, KVScale]:
    """Return the scales of a safetensors checkpoint by layer; empty if it has none.

    Raises ValueError if a layer has only one of its two scales, or if one is not a single float.
    """
    found: dict[int, dict[str, float]] = {}
    for file in find_shards(path, SAFETENSORS):
        for name, value in _scalars(file):
            match = _NAME.match(name)
            assert match is not None, "only names that match are read"
            parts = match["part"] or match["projection"]
            for part in parts:
                found.setdefault(int(match["layer"]), {})[part] = value
    for layer, scales in found.items():
        for part in {"k", "v"} - scales.keys():
            raise ValueError(
                f"{path}: layer {layer} has only one scale of an FP8 KV cache; {part}_scale is missing. Download "
                "the checkpoint again, or give --quantization-param-path."
            )
    return {layer: KVScale(scales["k"], scales["v"]) for layer, scales in found.items()}


def _scalars(file: Path) -> Iterator[tuple[str, float]]:
    """Yield the scales of a file with their names."""
    with file.open("rb") as opened:
        for entry in read_header(file):
            if not _NAME.match(entry.name):
                continue
            if entry.dtype not in _FORMATS or prod(entry.shape) != 1:
                raise ValueError(
                    f"{entry.name} is {entry.dtype} of shape {list(entry.shape)}. Supported: one float for each layer. "
                    "Give --quantization-param-path, or --kv-cache-dtype auto."
                )
            form = _FORMATS[entry.dtype]
            opened.seek(entry.start)
            (value,) = struct.unpack(form, opened.read(struct.calcsize(form)))
            # A bfloat16 is the upper half of a float32.
            if form == "<H":
                (value,) = struct.unpack("<f", struct.pack("<I", value << 16))
            yield entry.name, value
