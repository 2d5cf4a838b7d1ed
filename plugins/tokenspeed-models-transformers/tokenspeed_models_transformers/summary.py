"""A description of a transformers model for the core, as JSON.

As a program it reads a configuration from standard input and prints the summary, or `{"error": ...}`.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from tokenspeed_models_transformers.library import REMOTE_CODE, make_model, read_config
from tokenspeed_models_transformers.recording import RECORD, UnsupportedModelError, record

_DTYPES = ("bfloat16", "float16", "float32")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MAX_LENGTHS = ("max_position_embeddings", "max_sequence_length", "seq_length", "max_seq_len")


def summarize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelInfo`, with `layers` instead of its cache groups. Raises ValueError."""
    hf_config = read_config(config)
    architecture = hf_config.model_type
    _refuse_unsupported(hf_config, architecture)
    text = hf_config.get_text_config()
    dtype = _dtype(hf_config)  # building the model changes it
    try:
        model = make_model(
            hf_config,
            torch.bfloat16,
            torch.device("meta"),
            RECORD,
            trusts_code=REMOTE_CODE in config,
        )
        # Classes of hybrid models are stateful, but layer_types may have attention only.
        if getattr(model, "_is_stateful", False) and not getattr(text, "layer_types", None):
            raise UnsupportedModelError("layers with a recurrent state are not supported")
        attention = record(model).attention
    except UnsupportedModelError as error:
        raise ValueError(f"{architecture} cannot run through transformers: {error}") from error
    num_layers = getattr(text, "num_hidden_layers", None)
    if num_layers is not None and len(attention) < num_layers:
        raise ValueError(
            f"{architecture} cannot run through transformers: {num_layers - len(attention)} of its {num_layers} "
            "layers have no self-attention. Layers with a state, and cross attention, are not supported"
        )
    return {
        "architecture": type(model).__name__,
        "vocab_size": text.vocab_size,
        "max_model_len": _max_length(text),
        "dtype": dtype,
        "num_parameters": sum(each.numel() for each in model.parameters()),
        "eos_token_ids": _ids(text.eos_token_id),
        "bos_token_id": next(iter(_ids(text.bos_token_id)), None),
        "is_bidirectional": any(each.is_bidirectional for each in attention),
        "layers": [
            (each.num_kv_heads, each.head_size, each.value_size, each.window) for each in attention
        ],
    }


def _refuse_unsupported(config: PreTrainedConfig, architecture: str) -> None:
    """Raise ValueError for unsupported properties that a forward does not show."""
    if config.is_encoder_decoder:
        raise ValueError(f"{architecture} cannot run through transformers: it has an encoder")
    text = config.get_text_config()
    # Repeated layers: early passes attend to the keys of the last pass, which depend on the chunks of a prompt.
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ValueError(
            f"{architecture} cannot run through transformers: recurrent_kv_cache_mode last_loop is not supported"
        )
    kinds = getattr(text, "layer_types", None) or ()
    other = sorted(set(kinds) - _LAYER_TYPES)
    if other:
        raise ValueError(
            f"{architecture} cannot run through transformers: layers of the type {', '.join(other)} are not supported"
        )


def _max_length(config: PreTrainedConfig) -> int:
    """Return the longest sequence. Raises ValueError if no key has it.

    Two types of rotary positions change with the length. Below their original length they do not.
    """
    found = [getattr(config, name, None) for name in _MAX_LENGTHS]
    length = next((each for each in found if isinstance(each, int) and each > 0), None)
    if length is None:
        raise ValueError(
            f"config.json has none of {', '.join(_MAX_LENGTHS)}; add the longest sequence with "
            "--hf-overrides '{\"max_position_embeddings\": …}'"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    # Some models have one for each type of layer, or none for some.
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            length = min(length, rope.get("original_max_position_embeddings") or length)
    return length


def _dtype(config: PreTrainedConfig) -> str:
    """Return the dtype of the checkpoint. Raises ValueError if it is not supported."""
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"config.json: dtype is {name!r}. Supported: {', '.join(_DTYPES)}")
    return name


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return token ids that a configuration gives as one id, a list or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def main() -> None:
    """Print the summary of the configuration on standard input."""
    try:
        summary = summarize(json.load(sys.stdin))
    except ValueError as error:
        summary = {"error": str(error)}
    print(json.dumps(summary))
    gc.freeze()  # or Python searches all objects of torch for garbage at the end


if __name__ == "__main__":
    main()
