"""A model of transformers as TokenSpeed runs it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tokenspeed_core.api import ANY_ARCHITECTURE, BuildContext
from tokenspeed_models.sharding import Partial, Replicated, ShardingSpec, compile_sharding
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
from tokenspeed_models_transformers.projections import UsualAttention, find_usual_attention
from tokenspeed_models_transformers.recording import RECORD, RecordedAttention, record
from tokenspeed_models_transformers.weights import CheckpointNames

log = logging.getLogger("tokenspeed.models")


class TransformersModel:
    """Runs the decoder of a causal language model on flat tokens, and its head on the wanted rows."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        if build.group("data").size > 1:
            raise ValueError(
                "models of transformers cannot share experts between engines; remove --data-parallel-size or "
                "--enable-expert-parallel"
            )
        trusts_code = REMOTE_CODE in config
        if trusts_code:
            log.warning("running code from the model's repository: %s", config[REMOTE_CODE])
        original = make_model(
            read_config(config), build.dtype, torch.device("meta"), RECORD, trusts_code=trusts_code
        )
        recorded = record(original)
        self._causal_lm = make_model(
            read_config(config), build.dtype, build.device, SERVE, trusts_code=trusts_code
        )
        self._decoder = self._causal_lm.get_submodule(recorded.decoder)
        usual = find_usual_attention(self._causal_lm, recorded.decoder, recorded.attention)
        _check_heads(recorded.attention, usual, build)
        rotations = {name: each.rotation for name, each in usual.items()}
        bound = bind_attention(self._causal_lm, recorded.attention, rotations, build)
        self._sinks = bound.sinks
        replacer = Replacer(build)
        attention = {name: (usual[name], call) for name, call in bound.calls.items()}
        replacer.replace(self._causal_lm, attention, recorded.experts)
        self._attention: tuple[Attention, ...] = (*bound.paged, *replacer.attention)
        allocate_parameters(self._causal_lm, build.device)
        _check_shared(replacer.sharding, build)
        compile_sharding(build, [*replacer.sharding, _ALL])
        self._names = CheckpointNames(
            self._causal_lm, original, replacer.slots, replacer.shards, build.group
        )
        self._keeps_layers, self._is_quantized = bool(replacer.slots), replacer.is_quantized
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
            self._causal_lm,
            self._decoder,
            self.logits,
            self._attention,
            self._sinks,
            keeps_layers=self._keeps_layers,
            is_quantized=self._is_quantized,
        )

    def weight_map(self) -> WeightMap:
        """Return the map from the names that transformers uses to parameters."""
        return self._names.weight_map()


_ALL = ShardingSpec("hidden states", Replicated(), Replicated(), 0)


def _check_heads(
    recorded: Sequence[RecordedAttention], usual: Mapping[str, UsualAttention], build: BuildContext
) -> None:
    """Raise ValueError if attention must be divided, and a module does not allow it."""
    left = [each.module for each in recorded if each.module not in usual]
    group = build.group("attn")
    if left and group.size > 1:
        raise ValueError(
            f"the heads of {left[0]} cannot be divided between {group.size} processes, because its attention has an unknown "
            "form. Use --attn-tp-size 1."
        )


def _check_shared(specs: Sequence[ShardingSpec], build: BuildContext) -> None:
    """Raise ValueError if there are several processes, and each would compute everything."""
    groups = [
        name for each in specs if isinstance(each.output, Partial) for name in each.output.groups
    ]
    if build.group("world").size > 1 and all(build.group(name).size == 1 for name in groups):
        raise ValueError(
            "the model has no attention, gated MLP or experts that these sizes can divide. Use other sizes, or one process."
        )


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
