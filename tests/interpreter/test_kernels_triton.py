"""The Triton kernels under Triton's interpreter, against the conformance kit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenspeed_core.kernels.attention import AttentionProblem
from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.testing.attention import check_attention
from tokenspeed_core.testing.conformance import check
from tokenspeed_core.testing.shapes import problems
from tokenspeed_kernels import descriptors

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy warns of log2(0)
]

CPU = torch.device("cpu")
MAX_ELEMENTS = 2000  # of a row: the interpreter is slow
TRITON = [spec for name, specs in sorted(vars(descriptors).items()) if name.startswith("TRITON_") for spec in specs]
WITH_DOTS = ("moe_experts",)


@pytest.mark.parametrize("spec", [s for s in TRITON if s.op != "attention"], ids=lambda s: s.op)
def test_a_triton_kernel_conforms_on_strided_and_empty_inputs(spec: KernelSpec) -> None:
    if spec.op in WITH_DOTS:  # the interpreter's bfloat16 products are wrong
        spec = replace(spec, capability=replace(spec.capability, dtypes=("float32", "float16")))
    cases = [p for p in problems(spec) if p.get("vocab_size", 0) < MAX_ELEMENTS]
    check(spec, CPU, cases=cases, num_rows=(0, 1, 5))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size", "window", "dtype"),
    [(4, 2, 32, 16, None, "float32"), (7, 1, 48, 8, 20, "float16"), (2, 2, 16, 64, None, "float16")],
)
def test_paged_attention_follows_the_formula(
    phase: str, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, window: int | None, dtype: str
) -> None:
    problem = AttentionProblem(
        phase, num_heads, num_kv_heads, head_size, dtype, dtype, block_size, head_size**-0.5, window
    )
    (spec,) = descriptors.TRITON_ATTENTION
    assert check_attention(spec, CPU, cases=[problem]) >= 5
