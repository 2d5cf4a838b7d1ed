"""Mixtral (arXiv:2401.04088): like Mistral, with a mixture of experts instead of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import RotaryDecoder
from tokenspeed_models_mistral.describe import read_mixtral


class MixtralForCausalLM(RotaryDecoder):
    """`MixtralForCausalLM` checkpoints."""

    renames: Mapping[str, str] = {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_mixtral(config), build)
