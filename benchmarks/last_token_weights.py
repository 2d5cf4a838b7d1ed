"""A load format of dummy weights with which the next token depends on the last token only, at the usual cost.

The output projections of attention and MLP are zero, so the rounding of a step with more tokens changes few choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed_core.api import LoadFormat

if TYPE_CHECKING:
    import torch

LAST_TOKEN = LoadFormat(name="last_token", load="last_token_weights:read", detect=())


def read(
    path: str, model: Any, report: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield dummy weights, with zeros for `o_proj` and `down_proj`. Raises ValueError as `read_dummy` does."""
    from tokenspeed_models.loading.dummy import read_dummy

    for name, weight in read_dummy(path, model, report):
        is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
        yield name, weight.zero_() if is_output else weight


def install(site: Path) -> None:
    """Write a distribution that registers the load format to a folder of `sys.path`."""
    info = site / "last_token_weights-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: last-token-weights\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[tokenspeed.load_formats]\nlast_token = last_token_weights:LAST_TOKEN [api1]\n"
    )
