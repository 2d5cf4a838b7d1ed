"""Quantization methods, one module each. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import Quantization
from tokenspeed_quantization import schemes

__all__ = ["COMPRESSED_TENSORS", "FP8", "FP8_BLOCK"]

COMPRESSED_TENSORS = Quantization(
    "compressed-tensors", "tokenspeed_quantization.compressed_tensors:read"
)
FP8 = Quantization("fp8", "tokenspeed_quantization.fp8:read", schemes.FP8)
FP8_BLOCK = Quantization("fp8-block", "tokenspeed_quantization.fp8:read_block", schemes.FP8_BLOCK)
