"""Find FlashInfer modules that are compiled on this machine by their files, without importing the library.

The library stores modules as `.cache/flashinfer/VERSION/ARCHITECTURES/cached_ops/NAME/NAME.so` below the home folder,
or below FLASHINFER_WORKSPACE_BASE. A module's name encodes all parameters that it was compiled for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOPPER = (9, 0)  # the library has a separate prefill kernel for it
BEFORE = (0, 7)  # the first version with other module names
MERGE = "cascade"  # the module that merges two partial results
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "e4m3": "float8_e4m3fn"}
_NAME = re.compile(
    r"batch_prefill_with_kv_cache_dtype_q_(?P<q>\w+?)_dtype_kv_(?P<kv>\w+?)_dtype_o_(?P=q)_dtype_idx_i32"
    r"_head_dim_qk_(?P<size>\d+)_head_dim_vo_(?P=size)_posenc_0_use_swa_(?P<window>True|False)"
    r"_use_logits_cap_False_f16qk_False(?P<hopper>_sm90)?\Z"
)
# 80, 90a, 120f: the minor version is the last digit.
_ARCHITECTURE = re.compile(r"(\d+)(\d)[af]?\Z")


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled attention module: its device, dtypes, head size, and the phases that it can serve."""

    compute_capability: tuple[int, int]
    dtype: str
    kv_dtype: str
    head_size: int
    has_window: bool
    phases: tuple[str, ...]


def compiled_modules() -> tuple[Module, ...]:
    """Return the modules compiled by the installed version of the library; none if its module names are unknown."""
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        return ()
    if not is_known(installed):
        return ()
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())
    return modules_in(Path(base, ".cache", "flashinfer", installed))


def is_known(installed: str) -> bool:
    """Return whether a version of the library uses the module names that are known here."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    return found is not None and (int(found[1]), int(found[2])) < BEFORE


def modules_in(cache: Path) -> tuple[Module, ...]:
    """Return the modules in the cache folder of a version, by device and name."""
    return tuple(
        module
        for folder in sorted(cache.glob("*/cached_ops"))
        for capability in _capabilities(folder.parent.name)
        for module in _modules(folder, capability)
    )


def _modules(folder: Path, capability: tuple[int, int]) -> Iterator[Module]:
    """Yield the modules for one device. Decode also needs the module that merges shared prefixes."""
    names = {path.stem for path in folder.glob("*/*.so") if path.stem == path.parent.name}
    for name in sorted(names):
        match = _NAME.match(name)
        if match is None or match["q"] not in _DTYPES or match["kv"] not in _DTYPES:
            continue
        phases = []
        if capability != HOPPER or bool(match["hopper"]) == (match["q"] == match["kv"]):
            phases.append("prefill")
        if not match["hopper"] and (MERGE in names or match["window"] == "True"):
            phases.append("decode")
        if phases:
            yield Module(
                capability,
                _DTYPES[match["q"]],
                _DTYPES[match["kv"]],
                int(match["size"]),
                match["window"] == "True",
                tuple(phases),
            )


def _capabilities(name: str) -> Iterator[tuple[int, int]]:
    """Yield the compute capabilities in a folder's name, such as "90a" or "80_90a"."""
    for part in name.split("_"):
        match = _ARCHITECTURE.match(part)
        if match is not None:
            yield int(match[1]), int(match[2])
