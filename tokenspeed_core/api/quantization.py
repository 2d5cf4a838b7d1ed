"""The contract of quantization methods: how checkpoints store linear layers, and the ops that compute with them.

A method is a `Quantization`. It says for each linear layer of a checkpoint which `QuantizationScheme` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

LayerSchemes = Callable[[str], "QuantizationScheme | None"]
"""Returns the scheme of a linear layer by its name in the checkpoint, such as "model.layers.0.self_attn.q_proj"."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor that belongs to a weight [out, in]: its size is that of the weight's axis `of`, over `per`.

    `per` 0 is an axis of size 1.
    """

    of: Literal["out", "in"]
    per: int = 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that belongs to a quantized weight, as checkpoints store it or as an op takes it.

    `name` is its suffix in the checkpoint. A `dtype` of "float" stands for any float dtype in a checkpoint, and for the
    model's dtype as an operand. `kind` is "quantized", "scale", or "index" for the group of each input feature. One
    that is not `is_needed` may occur in a checkpoint and is not read. `typical` is the value of a scale that gives
    random weights a usual size.
    """

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    kind: Literal["quantized", "scale", "index"] = "quantized"
    is_needed: bool = True
    typical: float = 1.0


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint stores a weight [out, in], and what the ops take instead.

    `repack` is "module:function". It takes the `stored` tensors of one projection by name, on the model's device, and
    returns the `operands` by name; None if they are the same. It raises ValueError for contents that it does not
    support. The linear op takes the operands after x (None stands for one that the scheme lacks), and the op that
    quantizes activations takes the `input_operands` after x. An operand with an "out" axis has it first; the rows of
    stacked projections follow each other. Other operands are shared by the projections: the largest value of floats;
    integers must be equal. Experts share the input operands too; their op takes those of a weight before its operands.
    """

    stored: tuple[StoredTensor, ...]
    operands: tuple[StoredTensor | None, ...]
    input_operands: tuple[StoredTensor, ...] = ()
    repack: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How a quantized linear layer is stored, and the ops that compute with it.

    Weights [O, I] and activations [T, I] are quantized, each with scales, and linear layers multiply the quantized
    values. Without `quantize` only weights are; then `linear` takes x as it is.

    With a `packing`, weights come from a quantized checkpoint, in the tensors that it names, and the fields that
    describe values and scales are not used. `problem` are further axes of the linear op.

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
    quantize: str | None  # op that quantizes activations; its axis is `size`; values and scales
    # Op with the axes of "linear"; takes x, its scales, weight, its scales, bias. None: the scheme is for experts alone.
    linear: str | None
    fused: Mapping[str, str] = field(default_factory=dict)
    quantize_weight: str | None = None  # the op that quantizes weights; None: `quantize`
    # Rows and columns of a weight that share a scale. None: one scale per row.
    scale_block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"  # the suffix of weight scales in a quantized checkpoint
    scale_dtype: str = "float32"
    values_per_element: int = 1  # adjacent values that are packed into one element of `dtype`
    has_tensor_scales: bool = False
    packing: Packing | None = None
    problem: Mapping[str, int] = field(default_factory=dict)


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
