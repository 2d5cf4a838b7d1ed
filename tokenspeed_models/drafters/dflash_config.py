"""Reads the `config.json` of DFlash drafters (arXiv:2602.06036), and plans them as draft models.

The published layout is a Qwen3 configuration with a `dflash_config`. Imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed_core.api import DraftModelInfo, DraftRequest, FullAttention, HiddenStates
from tokenspeed_models.config import ConfigReader, DecoderConfig, is_list_of
from tokenspeed_models.describe import count_parameters, read_qwen3
from tokenspeed_models.drafters.target import hidden_size

ARCHITECTURE = "DFlashDraftModel"
_NESTED = "dflash_config"
# Keys that change a drafter's arithmetic, each with the only value that is supported: the one that changes nothing.
_UNSUPPORTED: Mapping[str, Any] = {
    "quantization_config": None,
    "is_causal": False,
    "causal": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "projector_type": None,
    "attention_mode": "gqa",
    "selector_rank": None,
    "conv_kernel_size": None,
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A drafter of Qwen3 layers for a target of the same hidden size.

    It reads the inputs of the target's `layers`. A block has `block_size` tokens, the last token of a sequence included.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    block_size: int
    mask_token_id: int


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError if any option is given: the drafter has none."""
    for name in options:
        raise ValueError(f"dflash has no option {name}. It takes no options.")


def plan(request: DraftRequest) -> DraftModelInfo:
    """Return a drafter as a draft model. Raises ValueError if it does not fit the target."""
    draft, target = request.draft, request.target.info
    assert draft is not None and target is not None, "the core resolves both checkpoints"
    try:
        c = read_dflash(
            draft.config,
            num_target_layers=target.num_layers,
            target_vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
        )
    except ValueError as error:
        raise ValueError(f"{draft.path}: {error}") from error
    decoder = c.decoder
    target_size = hidden_size(request.target.config)
    if target_size is not None and decoder.hidden_size != target_size:
        raise ValueError(
            f"{draft.path} is a drafter for hidden size {decoder.hidden_size}, and the target has {target_size}. "
            "Use a drafter that was trained for this model."
        )
    return DraftModelInfo(
        load="tokenspeed_models.drafters.dflash:DFlashDrafter",
        config={"dflash": c},
        cache_groups=(
            FullAttention("full", decoder.num_layers, decoder.num_kv_heads, decoder.head_size),
        ),
        num_layers=decoder.num_layers,
        num_parameters=_count_parameters(c),
        weights=draft.path,
        hidden=HiddenStates.LAYERS,
        layers=c.layers,
        mask_token_id=c.mask_token_id,
        max_drafts=c.block_size - 1,
    )


def read_dflash(
    config: Mapping[str, Any],
    *,
    num_target_layers: int,
    target_vocab_size: int,
    max_model_len: int,
) -> DFlashConfig:
    """Read a drafter's configuration for a target.

    Raises ValueError naming the key if the configuration is not supported or made for another target.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or ARCHITECTURE not in named:
        raise ValueError(
            f"config.json: architectures is {named}, which is not a DFlash drafter. Supported: {ARCHITECTURE}."
        )
    nested = config.get(_NESTED)
    if not isinstance(nested, Mapping):
        raise ValueError(f"config.json: {_NESTED} is {nested!r}, expected an object")
    _check_supported(config, nested)
    decoder = read_qwen3({**config, "use_sliding_window": False})
    keys = ConfigReader({**config, **nested})
    for key, expected in (
        ("num_target_layers", num_target_layers),
        ("vocab_size", target_vocab_size),
        ("target_hidden_size", decoder.hidden_size),
    ):
        value = keys.integer(key, expected)
        if value != expected:
            raise ValueError(
                f"config.json: {key} is {value}, expected {expected}. Use a drafter that was trained for this model."
            )
    block_size = keys.integer("block_size")
    if block_size < 2:
        raise ValueError(f"config.json: block_size is {block_size}, expected at least 2")
    # Positions beyond those of the training are rotated too.
    rope = replace(decoder.rope, max_positions=max(decoder.rope.max_positions, max_model_len))
    decoder = replace(decoder, rope=rope, max_model_len=rope.max_positions)
    return DFlashConfig(
        decoder, _layers(keys, num_target_layers), block_size, _mask(keys, target_vocab_size)
    )


def _check_supported(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for key, neutral in _UNSUPPORTED.items():
        for part, place in ((nested, f"{_NESTED}."), (config, "")):
            value = part.get(key)
            if value is not None and value != neutral:
                raise ValueError(
                    f"config.json: {place}{key} is set, which is not supported for DFlash drafters"
                )
    kinds = config.get("layer_types")
    if kinds is not None and not (kinds and is_list_of(kinds, ("full_attention",))):
        raise ValueError(
            "config.json: layer_types has other layers than full_attention, which is not supported for DFlash drafters"
        )


def _layers(keys: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input the drafter reads; the configuration names layers by their output."""
    outputs = keys.integers("target_layer_ids")
    if not outputs:
        raise ValueError(
            f"config.json: {_NESTED}.target_layer_ids is missing, expected a list of the target's layers"
        )
    if not all(0 <= layer < num_layers - 1 for layer in outputs):
        named = ", ".join(map(str, outputs))
        raise ValueError(
            f"the drafter reads the outputs of layers {named}, but the target provides those of layers 0 to "
            f"{num_layers - 2}. Use a drafter that was trained for this model."
        )
    return tuple(layer + 1 for layer in outputs)


def _mask(keys: ConfigReader, vocab_size: int) -> int:
    ids = keys.integers("mask_token_id")
    if len(ids) != 1 or not 0 <= ids[0] < vocab_size:
        value = keys.config.get("mask_token_id")
        raise ValueError(
            f"config.json: {_NESTED}.mask_token_id is {value!r}, expected a token of the target's vocabulary, "
            f"0 to {vocab_size - 1}"
        )
    return ids[0]


def _count_parameters(c: DFlashConfig) -> int:
    """Return the number of parameters: the layers, the final norm, `fc` and its norm."""
    hidden = c.decoder.hidden_size
    layers = count_parameters(replace(c.decoder, vocab_size=0))
    return layers + len(c.layers) * hidden * hidden + hidden
