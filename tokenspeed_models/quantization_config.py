"""Which method of quantization a checkpoint is stored by, as `quantization_config` in its `config.json` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A form of checkpoint, the method that computes with it, and how it is recognised.

    `holds` takes a `quantization_config`, and may fail with what indexing anything but such a thing fails with.
    """

    method: str
    description: str
    holds: Callable[[Mapping[str, Any]], bool]


def read_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the method of a checkpoint whose linear maps, all but the head, are stored quantised, or None.

    Raises ValueError, saying what was found, on a form that cannot be served.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    for form in FORMS:
        try:
            if form.holds(found):
                return form.method
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise ValueError(
        f"config.json: quantization_config is {found!r:.300}: served are checkpoints "
        f"{', and '.join(form.description for form in FORMS)}; use one of these, or an unquantised one with "
        "--quantization fp8"
    )


def _is_rowwise(found: Mapping[str, Any]) -> bool:
    (group,) = found["config_groups"].values()
    return (
        found["quant_method"] == "compressed-tensors" and group["targets"] == ["Linear"]
        and found.get("ignore") == ["lm_head"] and found.get("kv_cache_scheme") is None
        and _WEIGHTS.items() <= group["weights"].items()
        and _ACTIVATIONS.items() <= group["input_activations"].items()
    )


def _is_blockwise(found: Mapping[str, Any]) -> bool:
    kept = found.get("modules_to_not_convert", found.get("ignored_layers"))
    return (
        found["quant_method"] == "fp8" and list(found["weight_block_size"]) == [128, 128]
        and found.get("activation_scheme", "dynamic") == "dynamic" and found.get("fmt", "e4m3") == "e4m3"
        and found.get("scale_fmt") in (None, "float") and not found.get("modules_to_convert")
        and all(name.endswith(_NO_LINEAR) for name in kept or ())
    )


_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_NO_LINEAR = ("lm_head", "embed_tokens", "norm")  # what may be listed as kept whole: it is, listed or not
FORMS = (
    StoredForm(
        "fp8",
        "of compressed-tensors that hold every Linear but lm_head as 8-bit float with strategy channel, and quantise "
        "activations as they come with strategy token", _is_rowwise,
    ),
    StoredForm(
        "fp8-block",
        "of fine-grained fp8 (quant_method fp8) with weight_block_size [128, 128], scales of any value, activations "
        "quantised as they come (activation_scheme dynamic), and every linear map but lm_head converted", _is_blockwise,
    ),
)
