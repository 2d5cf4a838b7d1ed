"""Every kernel of this distribution on a real device, graphs included, against the conformance kit."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.testing.attention import check_attention
from tokenspeed_core.testing.conformance import check
from tokenspeed_kernels import descriptors

pytestmark = pytest.mark.gpu

ALL = [spec for specs in vars(descriptors).values() if isinstance(specs, tuple) for spec in specs]
SPECS = [spec for spec in ALL if isinstance(spec, KernelSpec) and "cuda" in spec.capability.platforms]


@pytest.mark.parametrize("spec", [s for s in SPECS if s.op != "attention"], ids=lambda s: f"{s.backend}-{s.op}")
def test_a_kernel_conforms_on_the_device(spec: KernelSpec) -> None:
    check(spec, torch.device("cuda"))


@pytest.mark.parametrize("num_rows", [64, 65, 300])
def test_the_product_in_eight_bits_conforms_on_both_sides_of_few_rows(num_rows: int) -> None:
    for spec in (spec for spec in SPECS if spec.op == "linear_fp8"):
        check(spec, torch.device("cuda"), num_rows=(num_rows,))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.op == "attention"], ids=lambda s: s.backend)
def test_paged_attention_conforms_on_the_device(spec: KernelSpec) -> None:
    check_attention(spec, torch.device("cuda"))
