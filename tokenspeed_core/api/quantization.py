"""The contract of quantization methods: how checkpoints store linear layers, and the ops that compute with them.

A method is a `Quantization`. It says for each linear layer of a checkpoint which `QuantizationScheme` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LayerSchemes = Callable[[str], "QuantizationScheme | None"]
"""Returns the scheme of a linear layer by its name in the checkpoint, such as "model.layers.0.self_attn.q_proj"."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How a quantized linear layer is stored, and the ops that compute with it.

    Weights [O, I] and activations [T, I] are quantized, each with scales, and linear layers multiply the quantized
    values.

    `fused` maps an op to a fused op. A normalisation or activation maps to the op that also quantizes its result.
    "linear", "add_rms_norm_linear", "add_rms_norm_mlp" and "moe_experts" map to ops that take unquantized activations
    and quantize them inside. Without "moe_experts", models with experts are refused.

    With `has_tensor_scales`, each operand also has a per-tensor scale, float32 [1]. Per-tensor scales of activations
    are measured on prompts, so a checkpoint must contain them, and weights cannot be quantized on load. They are extra
    arguments: `quantize` takes the activations' scale last. `linear` takes the product of both operands' scales before
    the bias. The experts' op takes the scale of a weight's inputs before that weight, and the per-tensor scales of the
    experts' weights, [E], after the weight's other scales.
    """

    name: str  # as plans show it, such as "fp8"
    dtype: str  # of quantized values
    quantize: str  # op that quantizes activations; returns values and scales; its axis is `size`
    linear: str  # op with the axes of "linear"; takes x, its scales, weight, its scales, bias
    fused: Mapping[str, str] = field(default_factory=dict)
    quantize_weight: str | None = None  # the op that quantizes weights; None: `quantize`
    # Rows and columns of a weight that share a scale. None: one scale per row.
    scale_block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"  # the suffix of weight scales in a quantized checkpoint
    scale_dtype: str = "float32"
    values_per_element: int = 1  # adjacent values that are packed into one element of `dtype`
    has_tensor_scales: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantization method: an entry point of `tokenspeed.quantization` with the name that users type.

    `read` is "module:function" in a module that imports no tensor library. It takes `quantization_config` of a
    checkpoint and returns the `LayerSchemes`, or None for a checkpoint of another method. It raises ValueError, saying
    what it found and what it supports, for a form of this method that it does not support; malformed configurations
    may raise KeyError, TypeError or AttributeError. The method that is called like `quant_method` reads first, the
    others follow in the order of their names, and the first one that returns schemes is used.

    `on_load` quantizes the linear layers of an unquantized checkpoint while they are loaded. None: the method needs a
    quantized checkpoint.
    """

    name: str
    read: str
    on_load: QuantizationScheme | None = None
