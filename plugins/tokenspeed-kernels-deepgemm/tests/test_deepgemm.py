"""The DeepGEMM backend over a mock of the library, its selection, and its recorded signatures."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenspeed_kernels_deepgemm import DEEPGEMM
from tokenspeed_kernels_deepgemm.linear import MAX_ROWS, compile_all, linear_fp8_block
from tokenspeed_testing.conformance import check
from tokenspeed_testing.explain import explain
from tokenspeed_testing.signatures import kept, library_of, read, restricted_to
from torch import Tensor

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

HAS_LIBRARY = importlib.util.find_spec("deep_gemm") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
CPU = torch.device("cpu")
PROBLEM = {"in_size": 4096, "out_size": 1024, "dtype": "bfloat16"}


def selector(
    capability: tuple[int, int], *backends: str, module_exists: Callable[[str], bool]
) -> Selector:
    catalog = Catalog.discover()
    wanted = [Override.parse("linear", backends)] if backends else []
    return Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability),
        wanted,
        ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}),
        module_exists=module_exists,
    )


def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, **given: Any) -> None:
    """Compute the library's result for these arguments, block by block."""
    assert given == {"disable_ue8m0_cast": True}
    (x, x_scale), (weight, weight_scale) = a, b
    assert all(tensor.is_contiguous() for tensor in (x, x_scale, weight, weight_scale, d))
    total = torch.zeros(d.shape)
    for block in range(x.shape[1] // 128):
        part = slice(128 * block, 128 * block + 128)
        scale = weight_scale[:, block].repeat_interleave(128)
        total += (
            x[:, part].float() @ weight[:, part].float().T * x_scale[:, block : block + 1] * scale
        )
    d.copy_(total)


@pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
def test_backend_conforms_over_a_mock_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType("deep_gemm")
    library.__dict__["fp8_gemm_nt"] = restricted_to(
        multiply, *(each["deep_gemm/__init__.py:fp8_gemm_nt"] for each in SIGNATURES.values())
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # skip compilation
    assert check(DEEPGEMM, CPU) >= 16


@pytest.mark.parametrize("took", [0.0, 2.0])
def test_all_kernels_are_compiled_at_start_and_logged_once(
    took: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[tuple[int, ...], ...]] = []
    clock = iter(took * each for each in range(1000))
    monkeypatch.setattr(
        "tokenspeed_kernels_deepgemm.linear.time", SimpleNamespace(monotonic=lambda: next(clock))
    )

    def product(*operands: Tensor | None) -> Tensor:
        asked.append(tuple(tuple(each.shape) for each in operands if each is not None))
        return torch.empty(0)

    with caplog.at_level("INFO"):
        compile_all(product, 512, 1024, torch.device("meta"))
    assert asked[0] == ((1, 512), (1, 4), (1024, 512), (8, 4))
    rows = [shapes[0][0] for shapes in asked]
    assert rows[:3] == [1, 16, 32], "up to which there are smaller tiles"
    assert rows[-1] == MAX_ROWS
    # Tiles have at least 64 rows if there are more rows, so these cover every number of tiles.
    assert {-(-each // 64) for each in rows} == set(range(1, MAX_ROWS // 64 + 1))
    expected = [
        "DeepGEMM is compiling kernels for in_size=512, out_size=1024; this takes up to a minute the first time"
    ]
    assert [record.getMessage() for record in caplog.records] == (expected if took else [])


def test_factory_compiles_for_its_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=multiply))
    monkeypatch.setattr(
        "tokenspeed_kernels_deepgemm.linear.compile_all", lambda *given: compiled.append(given[1:])
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    linear_fp8_block(PROBLEM)
    assert compiled == [(4096, 1024, torch.device("cuda"))]


def test_it_is_selected_by_name_only() -> None:
    for names, taken in (((), "triton"), (("deepgemm",), "deepgemm")):
        chosen = selector((9, 0), *names, module_exists=lambda name: True)
        assert chosen.select("linear_fp8_block", PROBLEM).spec.backend == taken


def test_plan_gives_the_reason_and_how_to_install_it() -> None:
    chosen = selector((10, 0), module_exists=lambda name: name != "deep_gemm")
    assert chosen.select("linear_fp8_block", PROBLEM).spec.backend == "triton"
    message = explain(chosen.plan(), "linear_fp8_block")
    assert "compute capability 10.0 is not supported" in message
    assert (
        "module 'deep_gemm' is not installed -> pip install 'tokenspeed-kernels-deepgemm[deepgemm]'"
        in message
    )


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_has_the_recorded_signatures() -> None:
    (wheel,) = Path(WHEELS or "").glob("sgl_deep_gemm-*.whl")
    assert {name: read(wheel, name) for name in SIGNATURES[library_of(wheel)]} == SIGNATURES[
        library_of(wheel)
    ]
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read("deep_gemm/__init__.py"))
        code = archive.read("deep_gemm/_C.so")
    (name,) = (
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "fp8_gemm_nt"
    )
    torch_schema = f"{name}(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(a!) d, Tensor? c, "
    cpp_name = f"dg_{name}N3tvm3ffi10TensorViewES1_S1_S1_S1_NS0_8OptionalIS1_vEE"  # five tensors and an optional one
    # Newer versions register a torch schema, older ones export a C++ symbol.
    patterns = (
        rb"\b" + re.escape(torch_schema).encode(),
        rb"_Z\d+" + re.escape(cpp_name).encode(),
    )
    assert any(re.search(each, code) for each in patterns)
