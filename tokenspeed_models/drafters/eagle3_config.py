"""Reads the `config.json` of EAGLE-3 heads (arXiv:2503.01840), and plans them as draft models.

Two layouts are published: a Llama configuration with `draft_vocab_size` (SafeAILab, SpecForge, NVIDIA), and one of the
speculators library with a nested `transformer_layer_config`. Imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenspeed_core.api import DraftModelInfo, DraftRequest, FullAttention, HiddenStates
from tokenspeed_models.config import ConfigReader, DecoderConfig
from tokenspeed_models.describe import count_parameters, read_llama
from tokenspeed_models.drafters.target import hidden_size
from tokenspeed_models.loading.safetensors_header import read_header

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
LAYERS_OPTION = "layers_to_capture"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Keys that change the head's arithmetic.
_UNSUPPORTED = ("fc_norm", "norm_output", "norm_before_fc", "bias")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A head of one Llama layer for a target of the same hidden size.

    The head reads the inputs of the target's `layers`. With `norm_before_residual`, the head's residual stream starts
    after the norm of the hidden states.
    """

    decoder: DecoderConfig
    draft_vocab_size: int
    layers: tuple[int, ...]
    norm_before_residual: bool


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that are not the drafter's."""
    for name in options:
        if name != LAYERS_OPTION:
            raise ValueError(f"eagle3 has no option {name}. Available: {LAYERS_OPTION}.")
    layers = options.get(LAYERS_OPTION)
    if layers is None:
        return
    if not isinstance(layers, list | tuple) or not layers or not all(map(_is_layer, layers)):
        raise ValueError(
            f"{LAYERS_OPTION} is {layers!r}, expected a list of layers, counted from 0"
        )


def plan(request: DraftRequest) -> DraftModelInfo:
    """Return a head as a draft model. Raises ValueError if it does not fit the target."""
    head, target = request.draft, request.target.info
    assert head is not None and target is not None, "the core resolves both checkpoints"
    try:
        c = read_eagle3(
            head.config,
            num_target_layers=target.num_layers,
            max_model_len=target.max_model_len,
            layers=request.options.get(LAYERS_OPTION),
        )
    except ValueError as error:
        raise ValueError(f"{head.path}: {error}") from error
    decoder = c.decoder
    target_size = hidden_size(request.target.config)
    if target_size is not None and decoder.hidden_size != target_size:
        raise ValueError(
            f"{head.path} is a head for hidden size {decoder.hidden_size}, but the target has {target_size}. "
            "Use a head that was trained for this model."
        )
    if decoder.vocab_size != target.vocab_size:
        raise ValueError(
            f"{head.path} is a head for a vocabulary of {decoder.vocab_size} tokens, and the target has "
            f"{target.vocab_size}. Use a head that was trained for this model."
        )
    _check_width(head.path, c, LAYERS_OPTION if LAYERS_OPTION in request.options else "config.json")
    return DraftModelInfo(
        load="tokenspeed_models.drafters.eagle3:Eagle3Head",
        config={"eagle3": c},
        cache_groups=(FullAttention("full", 1, decoder.num_kv_heads, decoder.head_size),),
        num_layers=1,
        num_parameters=_count_parameters(c),
        weights=head.path,
        hidden=HiddenStates.LAYERS,
        layers=c.layers,
    )


def _check_width(folder: Path, c: Eagle3Config, origin: str) -> None:
    """Raise ValueError if the head's `fc.weight` combines a different number of layers than `c.layers` names.

    Heads without weights pass. `origin` is the option or file that names the layers.
    """
    for file in sorted(folder.glob("*.safetensors")):
        for entry in read_header(file):
            if entry.name.removeprefix("model.") != "fc.weight" or len(entry.shape) != 2:
                continue
            num_read, rest = divmod(entry.shape[1], c.decoder.hidden_size)
            if not rest and num_read != len(c.layers):
                raise ValueError(
                    f"{folder}: the head reads {num_read} layers (fc.weight), but {origin} names {len(c.layers)}. "
                    f"Name {num_read} layers with --eagle3-layers-to-capture, or {LAYERS_OPTION} in "
                    "--speculative-config."
                )


def read_eagle3(
    config: Mapping[str, Any],
    *,
    num_target_layers: int,
    max_model_len: int,
    layers: Sequence[int] | None = None,
) -> Eagle3Config:
    """Read a head's configuration for a target.

    `layers`, if given, replaces the layers in the configuration; the head reads their outputs. Raises ValueError naming
    the key if the configuration is not supported.
    """
    _check_architecture(config)
    nested = config.get("transformer_layer_config")
    if isinstance(nested, Mapping):
        if "norm_before_residual" not in config:
            raise ValueError("config.json: norm_before_residual is missing, expected true or false")
        config = {**nested, **config, "tie_word_embeddings": False}
    keys = ConfigReader(config)
    for key in _UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"config.json: {key} is set, which is not supported for EAGLE-3 heads")
    if keys.integer("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"config.json: num_hidden_layers is {config['num_hidden_layers']}; only EAGLE-3 heads with one layer are "
            "supported"
        )
    decoder = read_llama({**config, "num_hidden_layers": 1})
    target_size = keys.integer("target_hidden_size", decoder.hidden_size)
    if target_size != decoder.hidden_size:
        raise ValueError(
            f"config.json: target_hidden_size is {target_size} and hidden_size is {decoder.hidden_size}; only equal "
            "sizes are supported"
        )
    # Heads are trained on short texts, and their max_position_embeddings does not limit their use.
    rope = replace(decoder.rope, max_positions=max(decoder.rope.max_positions, max_model_len))
    decoder = replace(decoder, rope=rope, max_model_len=rope.max_positions)
    draft_vocab_size = keys.integer("draft_vocab_size", decoder.vocab_size)
    if draft_vocab_size > decoder.vocab_size:
        raise ValueError(
            f"config.json: draft_vocab_size ({draft_vocab_size}) is above vocab_size ({decoder.vocab_size})"
        )
    # Some configurations copy the key from the target, but a head with a part of the vocabulary has its own weights.
    if keys.boolean("tie_word_embeddings", False) and draft_vocab_size == decoder.vocab_size:
        raise ValueError(
            "config.json: tie_word_embeddings is set, which is not supported for EAGLE-3 heads with the whole vocabulary"
        )
    return Eagle3Config(
        decoder,
        draft_vocab_size,
        _layers(config, num_target_layers, layers),
        keys.boolean("norm_before_residual", False),
    )


def _check_architecture(config: Mapping[str, Any]) -> None:
    named = config.get("architectures")
    if not isinstance(named, list) or not any(each in ARCHITECTURES for each in named):
        raise ValueError(
            f"config.json: architectures is {named}, which is not an EAGLE-3 head. Supported: {', '.join(ARCHITECTURES)}."
        )


def _layers(
    config: Mapping[str, Any], num_layers: int, outputs: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the layers whose input the head reads: a low, a middle and a high one, unless layers are named.

    `outputs` and `eagle_config` name layers by their output, and speculators name them by their input.
    """
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"config.json: eagle_config is {nested!r}, expected an object")
    if nested is not None:
        if nested.get("use_aux_hidden_state") is False:
            raise ValueError(
                "config.json: eagle_config.use_aux_hidden_state is false: the head reads the last hidden state only, "
                "which is not supported"
            )
        outputs = outputs or ConfigReader(nested).integers(_LAYER_IDS)
    inputs = [layer + 1 for layer in outputs or ()] or ConfigReader(config).integers(_LAYER_IDS)
    layers = tuple(inputs or (2, num_layers // 2, num_layers - 3))
    if not all(0 <= layer < num_layers for layer in layers):
        named = ", ".join(str(layer - 1) for layer in layers)
        raise ValueError(
            f"the head reads the outputs of layers {named}, but the target provides those of layers 0 to {num_layers - 2}. "
            "Use a head that was trained for this model, or --eagle3-layers-to-capture."
        )
    return layers


def _is_layer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count_parameters(c: Eagle3Config) -> int:
    decoder, hidden = c.decoder, c.decoder.hidden_size
    layer = count_parameters(replace(decoder, vocab_size=0))
    wider = hidden * (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_size
    fc = len(c.layers) * hidden * hidden
    return layer + wider + hidden + fc + c.draft_vocab_size * hidden
