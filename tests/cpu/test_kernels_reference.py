"""The torch reference kernels on the CPU, against the conformance kit and against formulas of their own."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.testing.attention import check_attention
from tokenspeed_core.testing.conformance import check
from tokenspeed_kernels import descriptors

CPU = torch.device("cpu")
TORCH = [spec for name, specs in sorted(vars(descriptors).items()) if name.startswith("TORCH_") for spec in specs]


@pytest.mark.parametrize("spec", [s for s in TORCH if s.op != "attention"], ids=lambda s: s.op)
def test_a_reference_conforms_in_every_dtype_on_strided_and_empty_inputs(spec: KernelSpec) -> None:
    check(spec, CPU)


def test_reference_attention_follows_the_formula_on_any_mix_of_rows() -> None:
    (spec,) = descriptors.TORCH_ATTENTION
    assert check_attention(spec, CPU) > 30
