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
    """An axis of a tensor that belongs to a weight [out, in]. Its size is that of the weight's axis `of`, divided by `per`.

    With `per` 0, the size is 1.
    """

    of: Literal["out", "in"]
    per: int = 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that belongs to a quantized weight, as checkpoints store it or as an op takes it."""

    name: str  # the suffix of its name in the checkpoint
    dtype: str  # "float": any float dtype in a checkpoint, the model's dtype as an operand
    axes: tuple[Axis, ...]
    kind: Literal["quantized", "scale", "index"] = "quantized"  # "index": the group of each column
    is_needed: bool = True  # False: a checkpoint may contain it, and it is not read
    typical: float = 1.0  # value of a scale with which random weights have a usual size


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors of a weight [out, in] in a checkpoint, and the operands of the ops that use it.

    An operand with an "out" axis has it first, and stacked projections are concatenated on it. Other operands are
    shared by the projections: of floats the largest value is used, and integers must be equal. The experts of a layer
    also share the input operands. The op of experts takes the input operands of a weight before its operands.
    """

    stored: tuple[StoredTensor, ...]
    operands: tuple[StoredTensor | None, ...]  # of the linear op, after x; None: the op gets None
    input_operands: tuple[StoredTensor, ...] = ()  # of the op that quantizes activations, after x
    # "module:function". Takes the `stored` tensors of a projection by name, on the model's device, and returns the
    # `operands` by name. Raises ValueError for unsupported contents. None: the stored tensors are the operands.
    repack: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """The storage of a quantized linear layer, and the ops that compute with it.

    Weights [O, I] and activations [T, I] are quantized to values with scales, which the linear op multiplies.

    With a `packing`, weights come from a quantized checkpoint, and the fields about values and scales are not used.

    With `has_tensor_scales`, weights and activations also have per-tensor scales, float32 [1]. Those of activations
    must be in the checkpoint, so the scheme cannot quantize on load. They are extra arguments: `quantize` takes the
    scale of activations last, and `linear` takes the product of both scales before the bias. The op of experts takes
    the scale of activations before each weight, and the per-tensor scales of the experts' weights, [E], after the
    weight's scales.
    """

    name: str  # as plans show it, such as "fp8"
    dtype: str  # of quantized values
    # Op that quantizes activations, with the axis `size`; returns values and scales. None: only weights are quantized,
    # and `linear` takes unquantized activations.
    quantize: str | None
    # Op with the axes of "linear"; takes x, its scales, weight, its scales, bias. None: the scheme is for experts alone.
    linear: str | None
    # Fused ops by the op that they replace. A norm, a norm with an all-reduce (FUSED_OP) or an activation maps to an op
    # that also quantizes its result. "linear", "add_rms_norm_linear", "add_rms_norm_mlp" and "moe_experts" map to ops
    # that quantize their activations. Without "moe_experts", models with experts are refused.
    fused: Mapping[str, str] = field(default_factory=dict)
    quantize_weight: str | None = None  # the op that quantizes weights; None: `quantize`
    # Rows and columns of a weight that share a scale. None: one scale per row.
    scale_block: tuple[int, int] | None = None
    scale_name: str = "weight_scale"  # the suffix of weight scales in a quantized checkpoint
    scale_dtype: str = "float32"
    values_per_element: int = 1  # adjacent values that are packed into one element of `dtype`
    has_tensor_scales: bool = False
    packing: Packing | None = None
    problem: Mapping[str, int] = field(default_factory=dict)  # further axes of the linear op


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantization method: an entry point of `tokenspeed.quantization` with the name that users type.

    For a quantized checkpoint, the method named like its `quant_method` reads first, then the others in the order of
    their names. The first one that returns schemes is used.
    """

    name: str
    # "module:function" in a module that imports no tensor library. Takes `quantization_config` and returns the
    # `LayerSchemes`, or None for a checkpoint of another method. Raises ValueError with a message for an unsupported
    # form of this method. May raise KeyError, TypeError or AttributeError for a malformed configuration.
    read: str
    # The scheme with which the method quantizes an unquantized checkpoint while it loads. None: it cannot.
    on_load: QuantizationScheme | None = None
