"""Read, merge and write measured rankings, as in `tokenspeed_kernels/rankings.py`."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterable
from pathlib import Path

from tokenspeed_core.api import Ranking
from tokenspeed_kernels.rankings import RANKINGS

LINE_WIDTH = 100
TEMPLATE = '''"""Measured rankings of backends.

benchmarks/rank_attention.py writes those of attention, benchmarks/rank_kernels.py those of other ops.
"""

from __future__ import annotations

from tokenspeed_core.api import Ranking

RANKINGS = (
{rankings})
'''


def update(path: Path, new: Iterable[Ranking]) -> None:
    """Write rankings to a file, and keep its other rankings, or the installed ones if there is no file yet."""
    old = runpy.run_path(str(path))["RANKINGS"] if path.exists() else RANKINGS
    path.write_text(text_of(merged(old, new)))


def merged(old: Iterable[Ranking], new: Iterable[Ranking]) -> tuple[Ranking, ...]:
    """Return all rankings; a new one replaces an old one of the same op, phase and compute capability."""
    found = {(each.op, each.phase, each.compute_capability): each for each in (*old, *new)}
    return tuple(found.values())


def text_of(rankings: Iterable[Ranking]) -> str:
    """Return the source of a module with these rankings, formatted."""
    return TEMPLATE.format(rankings="".join(map(source, rankings)))


def source(ranking: Ranking) -> str:
    """Return the source of a ranking."""
    phase = "None" if ranking.phase is None else f'"{ranking.phase}"'
    rows = "".join(_row(*each) for each in ranking.figures)
    return (
        f'    Ranking(\n        "{ranking.op}",\n        {phase},\n        {ranking.compute_capability},\n'
        f"        (\n{rows}        ),\n    ),\n"
    )


def _row(backend: str, figure: str) -> str:
    first, second = (json.dumps(text, ensure_ascii=False) for text in (backend, figure))
    row = f"            ({first}, {second}),\n"
    if len(row) <= LINE_WIDTH + 1:
        return row
    return f"            (\n                {first},\n                {second},\n            ),\n"
