"""Block-scaled experts and quantization for Blackwell under Triton's interpreter.

When rounding to e4m3, the interpreter loses the carry to the next power of two and truncates subnormals. It also reads
an e4m3 scale as an exponent. So quantization is tested separately, on values without such cases, and the GEMMs are
tested on rows that the reference quantized (for NVFP4 with power-of-two scales).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_kernels_blackwell import MOE
from tokenspeed_kernels_blackwell.linear import quantize, reference
from tokenspeed_kernels_blackwell.moe import experts
from tokenspeed_kernels_blackwell.moe import inputs as experts_inputs
from tokenspeed_kernels_blackwell.moe import reference as experts_reference
from tokenspeed_kernels_blackwell.moe.experts import TILINGS
from tokenspeed_testing.conformance import agrees_with_reference, check
from tokenspeed_testing.shapes import contract_of, problems
from torch import Tensor

from tokenspeed_core.api import Tolerance

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
NEAR = tuple(
    Tolerance(dtype, limit, limit, "none")
    for dtype, limit in (("bfloat16", 2e-2), ("float16", 2e-3))
)
ROWS = (0, 1, 2 * TILINGS[0].block_t, 6 * TILINGS[0].block_t + 3, 3 * TILINGS[1].block_t + 5)


def rows_of_all_sizes(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((9, size + 8), generator=generator) * torch.logspace(-6, 6, 9).unsqueeze(1)
    x[3, :40] = 0.0
    return x[:, 8:]


@pytest.mark.parametrize("size", [64, 96, 4096 + 32])
def test_mxfp8_quantization_matches_the_reference_bitwise(size: int) -> None:
    x = rows_of_all_sizes(size)
    (codes, scale), (found, found_scale) = reference.mxfp8_rows(x), quantize.mxfp8_rows(x)
    assert torch.equal(found_scale, scale)
    code, found_code = codes.view(torch.uint8), found.view(torch.uint8)
    sure = (code & 7 != 0) & (code & 127 > 7)
    assert sure.float().mean() > 0.7
    assert torch.equal(found_code[sure], code[sure])


def test_mxfp8_scale_is_exact_at_powers_of_two() -> None:
    edges = 448.0 * torch.exp2(torch.arange(-134, 120, 11).double()).float()
    near = torch.stack(
        [edges, torch.nextafter(edges, 2 * edges), torch.nextafter(edges, 0 * edges), edges / 1.75]
    )
    x = torch.zeros(near.numel() + 1, 32)
    x[:-1, 7] = -near.flatten()
    assert torch.equal(quantize.mxfp8_rows(x)[1], reference.mxfp8_rows(x)[1])


@pytest.mark.parametrize("size", [64, 96, 2048 + 32])
def test_nvfp4_quantization_matches_the_reference_bitwise(size: int) -> None:
    x = rows_of_all_sizes(size)
    for row in x:
        scale = (row.abs().amax() / 2688).view(1)
        codes, group_scale = (
            each.view(torch.uint8) for each in reference.nvfp4_rows(row[None], scale)
        )
        found, found_scale = (
            each.view(torch.uint8) for each in quantize.nvfp4_rows(row[None], scale)
        )
        without_carry = group_scale & 7 != 0
        assert torch.equal(found_scale[without_carry], group_scale[without_carry])
        same = (found_scale == group_scale).repeat_interleave(8, dim=1)
        assert same.float().mean() > 0.4
        assert torch.equal(found[same], codes[same])


def test_e2m1_ties_round_to_even() -> None:
    x = torch.tensor(
        [
            [
                6.0,
                0.25,
                0.75,
                1.25,
                1.75,
                2.5,
                3.5,
                5.0,
                -0.25,
                -0.75,
                -1.25,
                -1.75,
                -2.5,
                -3.5,
                -5.0,
                -0.0,
            ]
        ]
    )
    one = torch.full((1,), 2.0 / 3)  # makes the group scale 1.5
    (codes, scale), (found, found_scale) = reference.nvfp4_rows(x, one), quantize.nvfp4_rows(x, one)
    assert torch.equal(found_scale.float(), scale.float()) and torch.equal(found, codes)


@pytest.mark.parametrize(("num_rows", "strided"), [(0, False), (ROWS[3], True)])
def test_mxfp8_experts_match_the_reference(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, strided: bool
) -> None:
    monkeypatch.setattr(experts, "mxfp8_rows", reference.mxfp8_rows)
    contract = replace(contract_of(MOE[0]), tolerances=NEAR)
    cases = list(problems(MOE[0], contract))
    assert cases
    for problem in cases:
        kernel = MOE[0].factory()(problem)
        agrees_with_reference(kernel, contract, problem, num_rows, CPU, strided=strided)


@pytest.mark.release
def test_mxfp8_experts_conform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "mxfp8_rows", reference.mxfp8_rows)
    contract = replace(contract_of(MOE[0]), tolerances=NEAR)
    assert check(MOE[0], CPU, contract=contract, num_rows=ROWS) >= 4 * len(ROWS)


def to_exponents(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to e2m1 like `nvfp4_rows`, with group scales that are powers of two up to 1/2, stored as exponents."""
    groups = x.float().unflatten(-1, (-1, 16)) / scale
    exponent = (groups.abs().amax(dim=-1) / 6).clamp(min=1e-6).log2().ceil().clamp(max=-1)
    each = groups / torch.exp2(exponent).unsqueeze(-1)
    code = (each.abs().unsqueeze(-1) - torch.tensor(reference.E2M1)).abs().argmin(dim=-1) + 8 * (
        each < 0
    )
    code = code.flatten(-2).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8).view(
        torch.float8_e4m3fn
    )


def of_exponents(codes: Tensor, exponents: Tensor) -> Tensor:
    """Dequantize the result of `to_exponents`, without the per-tensor scale."""
    return reference.nvfp4_values(codes, torch.exp2(exponents.view(torch.uint8).float() - 127))


@pytest.mark.release
def test_nvfp4_experts_conform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (experts, experts_inputs, experts_reference):
        monkeypatch.setattr(module, "nvfp4_rows", to_exponents)
    monkeypatch.setattr(experts_reference, "nvfp4_values", of_exponents)
    monkeypatch.setattr(experts_inputs, "NVFP4_MAX", 2.0)  # below 6 * 1/2
    contract = replace(contract_of(MOE[1]), tolerances=NEAR)
    assert check(MOE[1], CPU, contract=contract, num_rows=ROWS) >= 4 * len(ROWS)
