"""Experts over a mock of the library, and what our calls assume of the library's source."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_kernels_flashinfer import EXPERTS
from tokenspeed_testing.conformance import check, make_inputs, prepared
from tokenspeed_testing.explain import explain
from tokenspeed_testing.shapes import contract_of
from tokenspeed_testing.signatures import kept, restricted_to
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops, installed_rankings
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

OURS = "tokenspeed-kernels-flashinfer"
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
NAME = "cutlass_fused_moe"
CPU = torch.device("cpu")
PROBLEM = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "dtype": "bfloat16",
}
ON_CPU = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is not None,
    reason="the library itself is installed, and it computes nothing on a CPU",
)
WITH_WHEEL = pytest.mark.skipif(
    WHEELS is None, reason="`nox -s vendors` downloads the library, which is large"
)


class Library:
    """A mock of the library's function that computes by its source. `tuned` has the experts of measured calls."""

    def __init__(self) -> None:
        self.is_tuning = False
        self.tuned: list[int] = []

    @contextmanager
    def autotune(self) -> Iterator[None]:
        """Measure the calls in the context."""
        self.is_tuning = True
        yield
        self.is_tuning = False

    def run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        fc1: Tensor,
        fc2: Tensor,
        dtype: torch.dtype,
        quant_scales: Any,
    ) -> Tensor:
        """Return the weighted sum of the experts; rows of the first weight are those of up, then those of gate."""
        assert quant_scales is None, "only for quantized weights"
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        # The library checks dtypes and sizes, but reads the memory without strides.
        assert all(each.is_contiguous() for each in (x, ids, weights, fc1, fc2))
        assert x.dtype == fc1.dtype == fc2.dtype == dtype
        assert len(x) > 0, "a launch of no programs fails"
        assert not fc1.shape[2] % 8 and not fc2.shape[2] % 8, "TMA loads 16 bytes"
        if self.is_tuning:
            self.tuned.append(len(fc2))
        y = torch.zeros(x.shape, dtype=torch.float32)
        for expert, (first, second) in enumerate(zip(fc1, fc2, strict=True)):
            tokens, ranks = (ids == expert).nonzero(as_tuple=True)
            up, gate = functional.linear(x[tokens], first).float().chunk(2, dim=1)
            hidden = (functional.silu(gate) * up).to(dtype)
            result = functional.linear(hidden, second).float() * weights[tokens, ranks].unsqueeze(1)
            y.index_add_(0, tokens, result)
        return y.to(dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Install a mock of the library that takes only calls of its recorded signatures."""
    made = Library()
    run = restricted_to(
        made.run, *(each[f"flashinfer/fused_moe/core.py:{NAME}"] for each in SIGNATURES.values())
    )
    for name, functions in (
        ("flashinfer", {"autotune": made.autotune}),
        ("flashinfer.fused_moe", {NAME: run}),
    ):
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@ON_CPU
@pytest.mark.usefixtures("library")
def test_experts_conform_over_a_mock_library() -> None:
    assert check(EXPERTS, CPU) >= 8


@ON_CPU
def test_tiles_are_measured_for_the_first_weights_only(library: Library) -> None:
    kernel = EXPERTS.factory()(PROBLEM)
    contract = contract_of(EXPERTS)
    given = make_inputs(contract, PROBLEM, 3, CPU, strided=False)
    first, second = (prepared(kernel, contract, given) for _ in range(2))
    assert library.tuned == [8]
    kernel(*first.values())
    assert library.tuned == [8], "serving measures nothing"
    for expected in (first, second):
        up, gate = expected["gate_up"].chunk(2, dim=1)
        assert torch.equal(torch.cat((gate, up), dim=1), given["gate_up"])
        assert torch.equal(expected["down"], given["down"])


@ON_CPU
@pytest.mark.usefixtures("library")
def test_weights_in_another_order_are_refused() -> None:
    given = make_inputs(contract_of(EXPERTS), PROBLEM, 3, CPU, strided=False)
    with pytest.raises(RuntimeError, match="Call prepare_weights"):
        EXPERTS.factory()(PROBLEM)(*given.values())


def selector(capability: tuple[int, int], *names: str) -> Selector:
    catalog = Catalog.discover()
    return Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability),
        [Override.parse("moe", names)] if names else [],
        ops=installed_ops(catalog),
        rankings=installed_rankings(catalog),
        needs=frozenset({"graph_safe"}),
        module_exists=lambda name: True,
    )


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_they_are_selected_by_name_only(capability: tuple[int, int]) -> None:
    chosen = selector(capability)
    assert chosen.select("moe_experts", PROBLEM).spec.backend == "triton"
    (line,) = (
        line
        for line in explain(chosen.plan(), "moe").splitlines()
        if f"not flashinfer from {OURS}" in line
    )
    assert "must be compiled before the first call" in line
    assert selector(capability, "flashinfer").select("moe_experts", PROBLEM).spec == EXPERTS


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((8, 9), {}, "9.0"),
        ((9, 0), {"intermediate_size": 100}, "intermediate_size 100 is not a multiple of 8"),
        ((9, 0), {"dtype": "float32"}, "float32"),
    ],
)
def test_reasons_name_what_does_not_fit(
    capability: tuple[int, int], changes: dict[str, Any], reason: str
) -> None:
    chosen = selector(capability, "flashinfer", "auto")
    assert chosen.select("moe_experts", {**PROBLEM, **changes}).spec.backend != "flashinfer"
    (line,) = (
        line
        for line in explain(chosen.plan(), "moe").splitlines()
        if f"not flashinfer from {OURS}" in line
    )
    assert reason in line


def content(pattern: str) -> str:
    """Return a file of the library's wheel."""
    (wheel,) = Path(WHEELS or "").glob("flashinfer_python-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if re.fullmatch(pattern, each))
        return archive.read(name).decode()


def function_in(source: str, name: str) -> ast.FunctionDef:
    """Return the last function of this name at the top of a module."""
    *_, found = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


@WITH_WHEEL
def test_library_activates_the_second_half_of_the_first_weight() -> None:
    source = content(r".*/cutlass_backend/cutlass_fused_moe_kernels\.cuh")
    kernel = source[source.index("__global__ void doGatedActivationKernel") :]
    order = re.compile(
        r"linear_value = \w+<[^;]*gemm_result_vec\[elem_index\]\);.*?"
        r"gate_value =\s*\w+<[^;]*gemm_result_vec\[elem_index \+ inter_size_vec\]\);\s*"
        r"auto gate_act = fn\(gate_value, linear_value\)",
        re.DOTALL,
    )
    assert order.search(kernel[: kernel.index("output_vec[elem_index] =")])
    assert "return fn(gate) * linear;" in source


@WITH_WHEEL
def test_library_skips_experts_outside_of_the_weights() -> None:
    source = content(r".*/cutlass_backend/cutlass_fused_moe_kernels\.cuh")
    assert "bool is_valid_expert = expert >= start_expert && expert < end_expert;" in source
    assert "if (expert_id < 0 || expert_id >= num_experts_per_node) {\n        continue;" in source


@WITH_WHEEL
def test_library_takes_our_dtypes_and_sizes() -> None:
    binding = content(r".*/cutlass_backend/flashinfer_cutlass_fused_moe_binding\.cu")
    for each in (
        "CHECK_INPUT_TYPE(token_selected_experts, dl_int32)",
        "CHECK_INPUT_TYPE(token_final_scales.value(), dl_float32)",
        "auto min_alignment = 128 / (8 *",
        "CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>",
        "CutlassMoeFCRunner<half, half>",
    ):
        assert each in binding, each


@WITH_WHEEL
def test_library_has_kernels_for_our_devices() -> None:
    core = content(r"flashinfer/fused_moe/core\.py")
    chooses = function_in(core, "get_cutlass_fused_moe_module")
    backends = {
        node.value
        for test in (each.test for each in ast.walk(chooses) if isinstance(each, ast.If))
        for node in ast.walk(test)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert backends >= {"90", "100", "103", "110", "120", "121"}
    low, high = EXPERTS.capability.min_compute_capability, EXPERTS.capability.max_compute_capability
    assert (low, high) == ((9, 0), (12, 1))
    functions = content(r"flashinfer/jit/fused_moe\.py")
    for name in (90, 100, 103, 120):
        assert f"def gen_cutlass_fused_moe_sm{name}_module(" in functions


@WITH_WHEEL
def test_library_computes_silu_and_measures_by_default() -> None:
    given = function_in(content(r"flashinfer/fused_moe/core\.py"), NAME).args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    by_name = dict(zip((each.arg for each in given.args), defaults, strict=True))
    assert ast.unparse(by_name["activation_type"] or ast.Constant("")) == "ActivationType.Swiglu"
    autotune = function_in(content(r"flashinfer/autotuner(/autotuner)?\.py"), "autotune").args
    assert len(autotune.args) == len(autotune.defaults)
    assert ast.unparse(autotune.defaults[0]) == "True"
    assert "from .autotuner import autotune as autotune" in content(r"flashinfer/__init__\.py")
