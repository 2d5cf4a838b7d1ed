"""Repacks the tensors of quantized checkpoints into the operands of our ops. Runs on the model's device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenspeed_kernels.reference.w4a16 import pack_int4

Tensors = Mapping[str, Tensor]
# The column of each group of 4 bits in an AWQ word, starting with the lowest bits.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_SYMMETRIC_ZERO = 8


def scaled(tensors: Tensors) -> Tensors:
    """Return a weight [O, I] with one scale per row, and the static input scale if there is one."""
    found = dict(tensors)
    weight = found.pop("weight")
    inputs = [name for name in found if name.startswith(("input", "activation"))]
    result = {"weight": weight}
    for name in inputs:
        result["input_scale"] = _positive(name, found.pop(name)).reshape(1)
    ((name, scale),) = found.items()
    result["scale"] = _positive(name, scale).reshape(-1, 1).expand(weight.shape[0], 1)
    return result


def awq(tensors: Tensors) -> Tensors:
    """Return the operands for qweight [I, O / 8], qzeros [I / G, O / 8] and scales [I / G, O]."""
    codes = _unpack(tensors["qweight"], _AWQ_COLUMNS).t()
    zeros = _unpack(tensors["qzeros"], _AWQ_COLUMNS).t()
    return {"weight": pack_int4(codes), "scale": tensors["scales"].t(), "zero": zeros}


def gptq(tensors: Tensors) -> Tensors:
    """Return the operands for qweight [I / 8, O], qzeros [I / G, O / 8], scales [I / G, O] and perhaps g_idx [I].

    Zero points are stored minus one, modulo 16.
    """
    return _gptq(tensors, 1)


def gptq_v2(tensors: Tensors) -> Tensors:
    """Return the operands as `gptq` does, for zero points that are stored without an offset."""
    return _gptq(tensors, 0)


def gptq_symmetric(tensors: Tensors) -> Tensors:
    """Return the operands as `gptq` does, without zero points. Raises ValueError if one is not 8."""
    return _symmetric(gptq(tensors))


def gptq_v2_symmetric(tensors: Tensors) -> Tensors:
    """Return the operands as `gptq_v2` does, without zero points. Raises ValueError if one is not 8."""
    return _symmetric(gptq_v2(tensors))


def compressed_tensors(tensors: Tensors) -> Tensors:
    """Return the operands for weight_packed [O, I / 8], weight_scale [O, I / G], and perhaps zero points and groups.

    weight_zero_point [O / 8, I / G] is packed along the rows, weight_g_idx [I] has the group of each column.
    """
    codes = _unpack(tensors["weight_packed"])
    result = {"scale": tensors["weight_scale"]}
    if "weight_zero_point" in tensors:
        result["zero"] = _unpack(tensors["weight_zero_point"].t()).t()
    if "weight_g_idx" in tensors:
        result["order"] = order = _order(tensors["weight_g_idx"], result["scale"].shape[1])
        codes = codes.index_select(1, order)
    return {**result, "weight": pack_int4(codes)}


def mxfp4(tensors: Tensors) -> Tensors:
    """Return the operands for weight_packed uint8 [O, I / 2], two adjacent codes in a byte, and weight_scale [O, I / 32]."""
    packed = tensors["weight_packed"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return {"weight": pack_int4(codes), "scale": tensors["weight_scale"]}


def _gptq(tensors: Tensors, offset: int) -> Tensors:
    codes = _unpack(tensors["qweight"].t())
    zeros = (_unpack(tensors["qzeros"]).t() + offset) & 15
    result = {"scale": tensors["scales"].t(), "zero": zeros}
    if "g_idx" in tensors:
        result["order"] = order = _order(tensors["g_idx"], zeros.shape[1])
        codes = codes.index_select(1, order)
    return {**result, "weight": pack_int4(codes)}


def _symmetric(operands: Tensors) -> Tensors:
    """Raise ValueError unless all zero points are 8."""
    if not bool((operands["zero"] == _SYMMETRIC_ZERO).all()):
        raise ValueError(
            "qzeros has zero points other than 8, but quantization_config declares symmetric weights (sym). Correct sym "
            "or checkpoint_format in config.json."
        )
    return operands


def _unpack(words: Tensor, columns: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return the 4-bit codes uint8 [N, 8 W] of int32 words [N, W]; `columns` is the place of each 4 bits of a word."""
    codes = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for index, column in enumerate(columns):
        codes[..., column] = words >> (4 * index) & 15
    return codes.flatten(-2)


def _order(groups: Tensor, num_groups: int) -> Tensor:
    """Return the columns in the order of their groups. Raises ValueError unless the groups are equal in size."""
    is_inside = bool(((groups >= 0) & (groups < num_groups)).all())
    sizes = groups.clamp(0, num_groups - 1).long().bincount(minlength=num_groups)
    if not is_inside or bool((sizes != groups.numel() // num_groups).any()):
        raise ValueError(
            f"g_idx does not assign the same number of columns to each of {num_groups} groups. Quantize the model again."
        )
    return groups.argsort(stable=True).to(torch.int32)


def _positive(name: str, scale: Tensor) -> Tensor:
    """Return a scale as float32. Raises ValueError unless it is positive and finite."""
    scale = scale.to(torch.float32)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(
            f"{name} has values that are not positive and finite. Quantize the model again."
        )
    return scale
