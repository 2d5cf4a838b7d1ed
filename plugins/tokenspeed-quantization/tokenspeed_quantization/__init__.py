"""Quantization methods, one module each. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import Quantization
from tokenspeed_quantization import schemes

__all__ = [
    "AUTO_ROUND",
    "AWQ",
    "COMPRESSED_TENSORS",
    "FP8",
    "FP8_BLOCK",
    "GPTQ",
    "MXFP4",
    "W8A8_FP8",
    "W8A8_INT8",
]

_HERE = "tokenspeed_quantization"

AUTO_ROUND = Quantization("auto-round", f"{_HERE}.auto_round:read")
AWQ = Quantization("awq", f"{_HERE}.awq:read")
COMPRESSED_TENSORS = Quantization("compressed-tensors", f"{_HERE}.compressed_tensors:read")
FP8 = Quantization("fp8", f"{_HERE}.fp8:read", schemes.FP8)
FP8_BLOCK = Quantization("fp8-block", f"{_HERE}.fp8:read_block", schemes.FP8_BLOCK)
GPTQ = Quantization("gptq", f"{_HERE}.gptq:read")
MXFP4 = Quantization("mxfp4", f"{_HERE}.mxfp4:read")
W8A8_FP8 = Quantization("w8a8_fp8", f"{_HERE}.fp8:read_w8a8", schemes.FP8)
W8A8_INT8 = Quantization("w8a8_int8", f"{_HERE}.w8a8_int8:read", schemes.INT8)
