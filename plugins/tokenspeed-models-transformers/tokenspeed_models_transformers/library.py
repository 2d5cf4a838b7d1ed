"""Configurations and models as transformers builds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tokenspeed_models_transformers.recording import UnsupportedModelError, one_line

REMOTE_CODE = "trust_remote_code"
"""The key under which the core puts the checkpoint's folder if the user trusts its code."""
_CHANGING_ROPE = ("dynamic", "longrope")
_QUANTIZATION = ("quantization_config", "compression_config")


def _unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the quantization that the core reads: transformers builds a plain model."""
    values = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    text = values.get("text_config")
    return {**values, "text_config": _unquantized(text)} if isinstance(text, Mapping) else values


def read_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a configuration with all defaults of its class. Raises ValueError."""
    # transformers writes infinity as {"__float__": "Infinity"}.
    values = PreTrainedConfig._decode_special_floats(_unquantized(config))
    values.pop(REMOTE_CODE, None)
    folder, classes = config.get(REMOTE_CODE), config.get("auto_map") or {}
    model_type = values.get("model_type")
    if folder is not None and "AutoConfig" in classes:
        found = get_class_from_dynamic_module(classes["AutoConfig"], folder)
    elif model_type in CONFIG_MAPPING:
        found = CONFIG_MAPPING[model_type]
    elif "AutoConfig" in classes:
        raise ValueError(
            f"model_type {model_type!r} is not part of transformers: it needs the code in its repository. If you trust "
            "that code, give --trust-remote-code"
        )
    else:
        raise ValueError(
            f"config.json: no installed plugin supports {', '.join(values.get('architectures') or ())}, and model_type "
            f"{model_type!r} is unknown to the installed transformers. Upgrade it with `pip install --upgrade transformers`"
        )
    try:
        result: PreTrainedConfig = found.from_dict(values)
    except Exception as error:  # may be of any type if a value is invalid
        raise ValueError(f"config.json is invalid for {model_type}: {one_line(error)}") from error
    result.name_or_path = folder or ""
    text = getattr(result, "text_config", result)
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = None  # tokens of images only, and prompts are texts
    return result


def make_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    *,
    trusts_code: bool,
) -> PreTrainedModel:
    """Build a causal language model with initialized buffers on a device, and parameters on the meta device.

    Raises UnsupportedModelError for an architecture that transformers does not build as a causal language model.
    """
    with no_init_weights(), _parameters_on_meta(), device:
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=implementation,
                experts_implementation=implementation,
                trust_remote_code=trusts_code,
            )
        except Exception as error:  # may be of any type if the configuration is incomplete
            reason = f"it cannot be built: {one_line(error)}"
            if isinstance(error, KeyError) and error.args == (implementation,):
                reason = "it does not use the attention interface of transformers"
            raise UnsupportedModelError(reason) from error
    model.tie_weights()
    for module in model.modules():
        _fix_frequencies(module)
    return model.eval().requires_grad_(False)


def _fix_frequencies(module: Any) -> None:
    """Let a rotary embedding use the frequencies of its original length for all sequences.

    Two types change them with the longest sequence in the batch, so cached keys would be wrong.
    """
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):  # one for each type of layer
        module.rope_type = {
            layer: "default" if each in _CHANGING_ROPE else each
            for layer, each in rope_type.items()
        }
        return
    if rope_type in _CHANGING_ROPE:
        module.rope_type = "default"
    needed = ("config", "inv_freq", "attention_scaling", "rope_init_fn")
    if not all(hasattr(module, name) for name in needed):
        return
    # PhiMoE initializes its frequencies in each forward, and scales angles by a factor that depends on the length.
    frequencies, scaling = module.inv_freq, module.attention_scaling
    parameters = getattr(module.config, "rope_parameters", None) or {}
    if rope_type in _CHANGING_ROPE and "short_mscale" in parameters:
        scaling = parameters["short_mscale"]
        module.config = copy(module.config)
        module.config.rope_parameters = {**parameters, "rope_type": "default"}
    module.rope_init_fn = lambda *arguments, **keywords: (frequencies, scaling)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it, so that it takes no memory."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate_parameters(model: PreTrainedModel, device: torch.device) -> None:
    """Give each parameter on the meta device uninitialized memory on a device. Tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                memory = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(memory, requires_grad=False)
            module._parameters[name] = made[parameter]
