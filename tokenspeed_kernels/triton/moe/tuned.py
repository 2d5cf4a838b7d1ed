"""The measured tilings of experts, by op and compute capability, in `tuned.json`.

`benchmarks/moe_tilings.py --out` writes the file. The defaults of `moe_experts` were found on an H200, those of 8-bit
experts on an H100.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Row = list[
    Any
]  # the largest average of pairs per expert (None: no limit), and the fields of a tiling
Tables = dict[str, dict[str, list[Row]]]  # by op, then by compute capability or DEFAULT

FILE = Path(__file__).with_name("tuned.json")
DEFAULT = "default"  # for compute capabilities that were not measured


def tuned_tilings(op: str, make: Callable[..., T]) -> tuple[tuple[float, T], ...]:
    """Return (largest average of pairs per expert, tiling) of an op for the current device.

    The last average is infinite. `make` gets the fields of a tiling. Call once, when binding a kernel.
    """
    tables = read_tables(FILE)[op]
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    rows = tables.get(table_key(capability), tables[DEFAULT])
    return tuple((math.inf if bound is None else bound, make(**fields)) for bound, fields in rows)


def read_tables(path: Path) -> Tables:
    """Read a file of tilings."""
    tables: Tables = json.loads(path.read_text(encoding="utf-8"))
    return tables


def table_key(capability: tuple[int, int] | None) -> str:
    """Return the key of a compute capability's table, that of the defaults if it is None."""
    return DEFAULT if capability is None else ".".join(map(str, capability))
