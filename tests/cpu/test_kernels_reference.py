"""The torch reference kernels pass the conformance kit on a CPU."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.conformance import check
from tokenspeed_testing.shapes import NUM_ROWS

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.targets import load_target
from tokenspeed_kernels import descriptors

CPU = torch.device("cpu")
TORCH = [
    spec
    for name, specs in sorted(vars(descriptors).items())
    if name.startswith("TORCH_")
    for spec in specs
]


@pytest.mark.parametrize("spec", [s for s in TORCH if s.op != "attention"], ids=lambda s: s.op)
def test_reference_conforms(spec: KernelSpec) -> None:
    # Expanded keys and experts of many rows take long on a CPU.
    is_slow = spec.op.startswith(("mla_", "moe_experts"))
    check(spec, CPU, num_rows=(0, 1, 7) if is_slow else NUM_ROWS)


def test_every_op_has_a_reference() -> None:
    catalog = Catalog.discover(Selection())
    ops, kernels = installed_ops(catalog), installed_kernels(catalog)
    # The kernel of exchange_tokens is its reference, which users choose by the name alltoall.
    references = {
        kernel.spec.op
        for kernel in kernels
        if kernel.spec.reference or kernel.spec.load == ops[kernel.spec.op].reference
    }
    assert len(ops) > 20
    for op in ops.values():
        assert callable(load_target(op.reference)), op.name
        assert op.name in references or (op.parts and set(op.parts) <= set(ops)), op.name


def test_reference_attention_conforms() -> None:
    spec, *_ = descriptors.TORCH_ATTENTION
    assert check_attention(spec, CPU) > 30
