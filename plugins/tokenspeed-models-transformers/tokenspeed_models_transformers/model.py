"""A model of transformers as TokenSpeed runs it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tokenspeed_core.api import ANY_ARCHITECTURE, BuildContext
from tokenspeed_models.weights import WeightMap
from tokenspeed_models_transformers.attention import SERVE, bind_attention
from tokenspeed_models_transformers.check import Attention, check_against_transformers
from tokenspeed_models_transformers.library import (
    REMOTE_CODE,
    allocate_parameters,
    make_model,
    read_config,
)
from tokenspeed_models_transformers.modules import Replacer
from tokenspeed_models_transformers.projections import find_usual_attention
from tokenspeed_models_transformers.recording import RECORD, record
from tokenspeed_models_transformers.weights import CheckpointNames

log = logging.getLogger("tokenspeed.models")


class TransformersModel:
    """Runs the decoder of a causal language model on flat tokens, and its head on the wanted rows."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        num_processes = build.group("world").size
        if num_processes > 1:
            raise ValueError(
                f"models of transformers run in one process, not in {num_processes}. Choose a tensor and expert parallel "
                "size of 1, or install a family that supports this architecture."
            )
        trusts_code = REMOTE_CODE in config
        if trusts_code:
            log.warning("running code from the model's repository: %s", config[REMOTE_CODE])
        recorded = record(
            make_model(
                read_config(config),
                build.dtype,
                torch.device("meta"),
                RECORD,
                trusts_code=trusts_code,
            )
        )
        self._causal_lm = make_model(
            read_config(config), build.dtype, build.device, SERVE, trusts_code=trusts_code
        )
        self._decoder = self._causal_lm.get_submodule(recorded.decoder)
        usual = find_usual_attention(self._causal_lm, recorded.decoder, recorded.attention)
        rotations = {name: each.rotation for name, each in usual.items()}
        bound = bind_attention(self._causal_lm, recorded.attention, rotations, build)
        self._sinks = bound.sinks
        replacer = Replacer(build)
        attention = {name: (usual[name], call) for name, call in bound.calls.items()}
        replacer.replace(self._causal_lm, attention, recorded.experts)
        self._attention: tuple[Attention, ...] = (*bound.paged, *replacer.attention)
        allocate_parameters(self._causal_lm, build.device)
        self._names = CheckpointNames(self._causal_lm, replacer.slots)
        self._is_quantized = bool(replacer.slots)
        # The head is the model with a decoder that returns given hidden states.
        self._given = _Given()
        parent, _, name = recorded.decoder.rpartition(".")
        setattr(self._causal_lm.get_submodule(parent), name, self._given)
        log.info(
            "%s runs through transformers %s, %s; TokenSpeed computes attention%s%s",
            type(self._causal_lm).__name__,
            transformers.__version__,
            "as the architecture * requests"
            if config.get("architectures") == [ANY_ARCHITECTURE]
            else "because no installed family supports it",
            "".join(f", {number} {kind}" for kind, number in replacer.replaced.items()),
            f"; transformers computes {', '.join(replacer.left)}" if replacer.left else "",
        )

    def forward(self, token_ids: Tensor, positions: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Return hidden states [R, hidden] of the rows in `wanted` (int64 [R]; None: all).

        token_ids and positions are int64 [T].
        """
        outputs = self._decoder(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: Tensor = outputs[0][0]
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab] of hidden states [R, hidden]."""
        self._given.hidden = hidden.unsqueeze(0)
        logits: Tensor = self._causal_lm(inputs_embeds=self._given.hidden, use_cache=False).logits
        return logits[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's weights, and compare the model with transformers.

        Raises ValueError naming each weight that is missing, unexpected or misshapen, or if the results differ.
        """
        self.weight_map().load(self._names.converted(weights))
        for name, sinks in self._sinks.items():
            sinks.copy_(self._names.targets[name])
        check_against_transformers(
            self._decoder, self._attention, self._sinks, is_quantized=self._is_quantized
        )

    def weight_map(self) -> WeightMap:
        """Return the map from the names that transformers uses to parameters."""
        return self._names.weight_map()


class _Given(nn.Module):
    """Replaces a decoder, and returns given hidden states."""

    hidden: Tensor

    def forward(self, *arguments: Any, **keywords: Any) -> _Outputs:
        """Return the hidden states."""
        return _Outputs(self.hidden)


class _Outputs:
    """The outputs of a decoder: hidden states, and None for all others."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None
