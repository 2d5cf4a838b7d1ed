"""The FlashAttention-4 backend over a mock of the library, its selection, and its recorded signature."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_kernels_blackwell import FA4
from tokenspeed_kernels_blackwell.attention import fa4
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.explain import explain
from tokenspeed_testing.signatures import kept, library_of, read, restricted_to
from torch import Tensor

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

HAS_LIBRARY = all(importlib.util.find_spec(name) for name in FA4.requires)
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
CALLED = "flash_attn/cute/interface.py:_flash_attn_fwd"
TILE = 128  # keys per iteration; the library handles pages of this size differently


def aligned(tensor: Tensor) -> bool:
    """Return whether the library uses a tensor without copying it."""
    steps = 16 // tensor.element_size()
    return tensor.stride(-1) == 1 and not any(stride % steps for stride in tensor.stride()[:-1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    window_size_left: int | None,
    window_size_right: int,
    learnable_sink: Tensor | None,
    num_splits: int,
    out: Tensor,
) -> tuple[Tensor, None, None, None, None]:
    """Compute the library's result for these arguments; rows without keys get zeros."""
    assert causal and window_size_right == 0 and num_splits == 1
    assert out.shape == q.shape and out.dtype == q.dtype == k.dtype == v.dtype
    assert all(map(aligned, (q, k, v, out))) and k.shape == v.shape and q.shape[1] % k.shape[2] == 0
    assert k.shape[1] != TILE and q.shape[2] % 16 == 0
    assert (
        page_table.shape[0] == seqused_k.shape[0] == cu_seqlens_q.shape[0] - 1
        and page_table.stride(-1) == 1
    )
    assert {cu_seqlens_q.dtype, seqused_k.dtype, page_table.dtype} == {torch.int32}
    assert cu_seqlens_q.stride(0) == seqused_k.stride(0) == 1 and seqused_k.max() <= max_seqlen_k
    for (start, stop), length, blocks in zip(
        pairwise(cu_seqlens_q.tolist()), seqused_k.tolist(), page_table, strict=True
    ):
        assert stop - start <= max_seqlen_q
        key, position = torch.arange(length), torch.arange(start, stop)[:, None] - stop + length
        at = blocks[key // k.shape[1]].long(), key % k.shape[1]
        queries = q[start:stop].float().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("tkgd,lkd->tkgl", queries, k[at].float()) * softmax_scale
        hidden = key > position
        if window_size_left is not None:
            hidden |= key < position - window_size_left
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        if learnable_sink is not None:
            assert learnable_sink.shape == q.shape[1:2]
            column = learnable_sink.view(1, k.shape[2], -1, 1).expand(len(scores), -1, -1, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1).nan_to_num()[..., :length]
        out[start:stop] = (
            torch.einsum("tkgl,lkd->tkgd", weights, v[at].float()).flatten(1, 2).to(out.dtype)
        )
    return out, None, None, None, None


def selector(capability: tuple[int, int], name: str, *, is_installed: bool = True) -> Selector:
    """Return the selector of a device with an attention backend named, with or without the library installed."""
    catalog = Catalog.discover()
    return Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability, f"compute capability {capability}"),
        [Override.parse("attention", (name,))],
        ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}),
        module_exists=lambda module: is_installed or module not in FA4.requires,
    )


def problem(phase: str = "prefill", block_size: int = 64, head_size: int = 128) -> AttentionProblem:
    return AttentionProblem(
        phase, 32, 8, head_size, "bfloat16", "bfloat16", block_size, head_size**-0.5, None
    )


@pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
def test_backend_conforms_over_a_mock_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType(fa4.LIBRARY)
    library.__dict__["_flash_attn_fwd"] = restricted_to(
        attend, *(each[CALLED] for each in SIGNATURES.values())
    )
    monkeypatch.setitem(sys.modules, fa4.LIBRARY, library)
    assert check_attention(FA4, torch.device("cpu")) > 40


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_it_is_selected_by_name_on_blackwell(capability: tuple[int, int], phase: str) -> None:
    assert selector(capability, "fa4").select_attention(problem(phase)).spec.backend == "fa4"


def test_auto_skips_fa4_because_it_compiles() -> None:
    chosen = selector((10, 0), "auto")
    assert chosen.select_attention(problem()).spec.backend == "blackwell"
    (message,) = [
        line for line in explain(chosen.plan(), "attention").splitlines() if "fa4" in line
    ]
    assert (
        "must be compiled before the first call" in message
        and "--attention-backend.prefill fa4" in message
    )


@pytest.mark.parametrize(
    ("capability", "asked", "reason"),
    [
        ((9, 0), problem(), "compute capability 9.0 is not supported"),
        ((12, 0), problem(), "compute capability 12.0 is not supported"),
        ((10, 0), problem(block_size=128), "block_size 128 is not supported"),
        ((10, 0), problem(head_size=72), "head_size 72 is not supported"),
    ],
)
def test_naming_fa4_for_unsupported_problems_fails(
    capability: tuple[int, int], asked: AttentionProblem, reason: str
) -> None:
    with pytest.raises(SelectionError, match=reason):
        selector(capability, "fa4").select_attention(asked)


def test_missing_library_error_shows_how_to_install_it() -> None:
    with pytest.raises(SelectionError, match=r"module 'flash_attn' is not installed") as caught:
        selector((10, 0), "fa4", is_installed=False).select_attention(problem())
    assert "pip install 'tokenspeed-kernels-blackwell[flash-attn-4]'" in str(caught.value)


NEEDS_WHEEL = pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library")


def wheel() -> Path:
    (found,) = Path(WHEELS or "").glob("flash_attn_4-*.whl")
    return found


def source(file: str) -> str:
    """Return a file of the library in normalized style, without comments."""
    with zipfile.ZipFile(wheel()) as archive:
        return ast.unparse(ast.parse(archive.read(f"flash_attn/cute/{file}.py")))


@NEEDS_WHEEL
def test_library_has_the_recorded_signature() -> None:
    assert {name: read(wheel(), name) for name in SIGNATURES[library_of(wheel())]} == SIGNATURES[
        library_of(wheel())
    ]
    with zipfile.ZipFile(wheel()) as archive:
        (about,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert b"\nRequires-Dist: quack-kernels" in archive.read(about)


@NEEDS_WHEEL
def test_library_takes_sinks_in_float32_and_a_soft_cap() -> None:
    called = source("interface")
    assert "_LEARNABLE_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)" in called
    assert "score_mod = utils.create_softcap_scoremod(softcap)" in called


@NEEDS_WHEEL
def test_library_accepts_declared_head_sizes_only() -> None:
    tree = ast.parse(source("interface"))
    (check,) = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "_validate_head_dims"
    ]
    library: dict[str, Any] = {"lru_cache": lru_cache}
    exec(compile(ast.Module([check], []), "flash_attn", "exec"), library)
    for size in FA4.capability.head_sizes:
        library["_validate_head_dims"](size, size, 10, 8)
        assert size % 16 == 0
    for size in (160, 192):
        with pytest.raises(AssertionError, match="is not supported on SM100/SM110"):
            library["_validate_head_dims"](size, size, 10, 8)
    # Irregular means not a multiple of 16.
    assert "'Paged KV does not support irregular head dim'" in source("flash_fwd_sm100")


@NEEDS_WHEEL
def test_only_tile_sized_pages_read_unwritten_memory() -> None:
    called = source("interface")
    assert "paged_kv_non_tma=page_size not in [None, tile_n]" in called
    assert f"cfg = FwdConfig({TILE}, {TILE}, True, True)" in called
    assert "row_valid = tXc0X[0, m, 0][0] < seqlenk_row_limit" in source("paged_kv")
    assert TILE not in FA4.capability.block_sizes
