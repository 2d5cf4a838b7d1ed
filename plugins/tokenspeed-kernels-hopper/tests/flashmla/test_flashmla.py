"""The backend `flashmla` over a mock of the library, its recorded signatures, and selection."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenspeed_kernels_hopper import FLASHMLA
from tokenspeed_testing.conformance import check
from tokenspeed_testing.explain import explain
from tokenspeed_testing.signatures import kept, library_of, read, restricted_to
from torch import Tensor

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops, installed_rankings
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog
from tokenspeed_kernels.reference.mla import mla_decode as reference

HAS_LIBRARY = importlib.util.find_spec("flash_mla") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
INTERFACE = "flash_mla/flash_mla_interface.py"
BACKEND = "tokenspeed_kernels_hopper.flashmla"
DEEPSEEK = {
    "phase": "decode",
    "num_heads": 128,
    "latent_size": 512,
    "rope_size": 64,
    "block_size": 64,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
}
NEEDS_MOCK = pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)


@dataclass
class Schedule:
    """The library's schedule of a step."""

    is_computed: bool = False


def get_mla_metadata() -> tuple[Schedule, None]:
    """Return an empty schedule. The second value is always None."""
    return Schedule(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Schedule,
    *,
    softmax_scale: float,
    use_legacy: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the result of `flash_mla_with_kvcache`. Rows without keys get zeros, as in the library."""
    assert use_legacy, "only the older kernels support this device and dense caches"
    num_rows, num_queries, _, width = q.shape
    assert num_rows > 0
    assert num_queries == 1
    assert (width, head_dim_v) == (576, 512)
    assert k_cache.shape[1:] == (64, 1, 576)
    assert q.dtype == k_cache.dtype == torch.bfloat16
    assert {block_table.dtype, cache_seqlens.dtype} == {torch.int32}
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
    assert cache_seqlens.is_contiguous()
    assert not tile_scheduler_metadata.is_computed, "its lengths may be those of another call"
    tile_scheduler_metadata.is_computed = True
    out = torch.zeros((*q.shape[:3], head_dim_v), dtype=q.dtype)
    for row, length in enumerate(cache_seqlens.tolist()):
        key = torch.arange(length)
        seen = k_cache[block_table[row, key // 64].long(), key % 64, 0].float()
        weights = (q[row, 0].float() @ seen.T * softmax_scale).softmax(-1)
        out[row, 0] = (weights @ seen[:, :head_dim_v]).to(q.dtype)
    return out, q.new_empty(0, dtype=torch.float32)


@pytest.fixture
def mock_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("flash_mla")
    for function in (flash_mla_with_kvcache, get_mla_metadata):
        recorded = [each[f"{INTERFACE}:{function.__name__}"] for each in SIGNATURES.values()]
        setattr(library, function.__name__, restricted_to(function, *recorded))
    library.has_legacy = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)


def selector(
    *backends: str, capability: tuple[int, int] = (9, 0), is_installed: bool = True
) -> Selector:
    catalog = Catalog.discover()
    return Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability),
        [Override.parse("attention", backends)] if backends else [],
        rankings=installed_rankings(catalog),
        ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}),
        module_exists=lambda name: name != "flash_mla" or is_installed,
    )


def explained(chosen: Selector) -> str:
    chosen.select("mla_decode", DEEPSEEK)
    return explain(chosen.plan(), "mla_decode")


@NEEDS_MOCK
@pytest.mark.usefixtures("mock_library")
@pytest.mark.parametrize("num_heads", [7, 16, 128])
def test_backend_conforms_over_a_mock_library(
    num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenspeed_kernels.triton.mla.absorbed.mla_decode", reference)
    problem = {**DEEPSEEK, "num_heads": num_heads}
    assert check(FLASHMLA, torch.device("cpu"), cases=[problem], num_rows=(0, 1, 17)) == 6


@NEEDS_MOCK
@pytest.mark.usefixtures("mock_library")
@pytest.mark.parametrize(("num_heads", "min_rows"), [(16, 16), (31, 16), (32, 2), (127, 2)])
def test_few_rows_run_the_portable_kernel(
    num_heads: int, min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable: list[int] = []

    def decode(q: Tensor, *_: object) -> Tensor:
        portable.append(q.shape[0])
        return q[..., :512]

    monkeypatch.setattr("tokenspeed_kernels.triton.mla.absorbed.mla_decode", lambda _: decode)
    kernel = FLASHMLA.factory()({**DEEPSEEK, "num_heads": num_heads})
    for num_rows in (1, min_rows - 1, min_rows, 40):
        q = torch.zeros((num_rows, num_heads, 576), dtype=torch.bfloat16)
        table = torch.zeros((num_rows, 1), dtype=torch.int32)
        lengths = torch.ones(num_rows, dtype=torch.int32)
        cache = torch.zeros((1, 64, 576), dtype=torch.bfloat16)
        assert kernel(q, cache, table, lengths, 1, 1.0, kernel.plan()).shape == (*q.shape[:2], 512)
    assert portable == [1, min_rows - 1]


@NEEDS_MOCK
@pytest.mark.usefixtures("mock_library")
def test_too_many_rows_are_rejected() -> None:
    kernel = FLASHMLA.factory()(DEEPSEEK)
    with pytest.raises(ValueError, match="supports 8192 rows, got 8193"):
        kernel(torch.empty((8193, 0)), *(None,) * 3, 1, 1.0)


@NEEDS_MOCK
@pytest.mark.usefixtures("mock_library")
@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_auto_selects_flashmla(num_heads: int) -> None:
    chosen = selector()
    spec = chosen.select("mla_decode", {**DEEPSEEK, "num_heads": num_heads}).spec
    assert spec.backend == "flashmla"
    (planned,) = chosen.plan().find("mla_decode")
    assert planned.note == spec.note
    assert "fewer than 16 rows with up to 31 heads, 1 row with up to 127" in planned.note


def test_plan_gives_the_reason_and_how_to_install_it() -> None:
    text = explained(selector(is_installed=False))
    install = "pip install 'tokenspeed-kernels-hopper[flashmla]'"
    assert f"module 'flash_mla' is not installed -> {install}" in text
    text = explained(selector(capability=(10, 0)))
    assert "compute capability 10.0 is not supported (supported: 9.0)" in text


@pytest.mark.parametrize(
    ("axis", "value", "reason"),
    [
        ("block_size", 16, "block_size 16 is not supported (supported: 64)"),
        ("latent_size", 256, "latent_size 256 is below 512"),
        ("rope_size", 32, "rope_size 32 is below 64"),
        ("kv_dtype", "float8_e4m3fn", "kv_dtype float8_e4m3fn is not supported"),
    ],
)
def test_unsupported_shapes_are_rejected_at_build(axis: str, value: Any, reason: str) -> None:
    with pytest.raises(SelectionError) as raised:
        selector("flashmla").select("mla_decode", {**DEEPSEEK, axis: value})
    assert reason in str(raised.value)


@NEEDS_MOCK
@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "it does not load: ModuleNotFoundError"),
        ({"has_legacy": lambda: False}, "flash_mla has no kernels for compute capability 9.0"),
    ],
    ids=["broken", "without Hopper"],
)
def test_library_that_does_not_load_is_not_used(
    library: dict[str, Any] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(**library) if library else None
    monkeypatch.setitem(sys.modules, "flash_mla", module)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    chosen = selector("flashmla", "auto")
    assert chosen.select("mla_decode", DEEPSEEK).spec.backend == "triton"
    assert reason in explain(chosen.plan(), "mla_decode")


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_has_the_recorded_signatures_and_limits() -> None:
    (wheel,) = Path(WHEELS or "").glob("sgl_flash_mla-*.whl")
    recorded = SIGNATURES[library_of(wheel)]
    assert {name: read(wheel, name) for name in recorded} == recorded
    with zipfile.ZipFile(wheel) as archive:
        code = archive.read("flash_mla/_C_legacy.abi3.so")
    assert b"Currently page_block_size must be 64" in code
    assert b"Dense decode MLA is only supported on SM90a" in code
