"""The block-wise FP8 GEMM under Triton's interpreter, against float64 on values dequantized by transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.triton.linear.gemm_fp8 import MAX_ROWS
from tokenspeed_kernels.triton.linear.gemm_fp8_block import FEW_ROWS, MIDDLE_ROWS, linear_fp8_block

pytestmark = pytest.mark.interpreter


def operand(rows: int, size: int, block_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales from transformers' quantization, and the values it dequantizes them to, in float64."""
    # Imported by the process that runs the test, not by all that collect it.
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)) * torch.logspace(
        -2, 1, size
    )
    config = FineGrainedFP8Config(weight_block_size=(block_rows, 128))
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": x})
    codes, scale = made["x.weight"], made["x.weight_scale_inv"]
    values = Fp8Dequantize(None).convert({"weight": [codes], "weight_scale_inv": [scale]})["weight"]
    return codes, scale, values.double()


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1, MAX_ROWS + 1, MIDDLE_ROWS + 1, 600])
def test_block_gemm_matches_transformers_dequantization(num_rows: int) -> None:
    x, x_scale, x_values = operand(num_rows, 384, 1)
    weight, weight_scale, weight_values = operand(256, 384, 128)
    bias = torch.randn(256, generator=torch.Generator().manual_seed(0))
    kernel = linear_fp8_block({"in_size": 384, "out_size": 256, "dtype": "float32"})
    expected = x_values @ weight_values.T + bias.double()
    found = kernel(x, x_scale, weight, weight_scale, bias).double()
    assert (found - expected).norm() / expected.norm() < 1e-6
