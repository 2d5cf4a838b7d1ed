"""A load format of dummy weights with which the next token is known, at the usual cost of a step.

The output projections of attention and MLP are zero, so a token's hidden state is its embedding. The output head has
the embeddings of the previous tokens, so token i is followed by i + 1, by a margin that no rounding closes. With tied
embeddings token i is followed by itself.
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
    """Yield dummy weights, changed as described above. Raises ValueError as `read_dummy` does."""
    from tokenspeed_models.loading.dummy import read_dummy

    embedding: torch.Tensor | None = None
    for name, weight in read_dummy(path, model, report):
        if name == "model.embed_tokens.weight":
            embedding = weight
        if name == "lm_head.weight" and embedding is not None:
            yield name, embedding.roll(1, dims=0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            yield name, weight.zero_()
        else:
            yield name, weight


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
