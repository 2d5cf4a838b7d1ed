"""Each model family on a GPU computes the tokens and log-probabilities of transformers, in float32.

Before 5.19, transformers ignores the clamp of gpt-oss' configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # for family_checks

from family_checks import Family, check_engine
from tiny_families import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_equals_transformers(family: str, tmp_path: Path) -> None:
    if family == "GptOss":
        pytest.importorskip("transformers", minversion="5.19")
    check_engine(Family(family, tmp_path), "cuda", depth=2)
