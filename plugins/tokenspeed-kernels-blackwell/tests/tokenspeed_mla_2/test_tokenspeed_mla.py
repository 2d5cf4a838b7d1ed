"""The backend `tokenspeed_mla` over a mock of the library, its recorded signature, and selection."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_kernels_blackwell import TOKENSPEED_MLA
from tokenspeed_testing.conformance import check
from tokenspeed_testing.signatures import kept, library_of, read, restricted_to
from torch import Tensor

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

HAS_LIBRARY = importlib.util.find_spec("tokenspeed_mla") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
DECODE = "tokenspeed_mla/mla_decode.py:tokenspeed_mla_decode"
NEEDS_WHEEL = pytest.mark.skipif(
    WHEELS is None, reason="`nox -s vendors` downloads the library, which is large"
)


def decode(**given: Any) -> Tensor:
    """Compute the library's result for these arguments. Rows without keys get NaN."""
    query, cache, table = given["query"], given["kv_cache"], given["block_tables"]
    rank, rope = given["kv_lora_rank"], given["qk_rope_head_dim"]
    assert query.dtype == cache.dtype
    assert query.shape[1] == 1
    assert query.shape[3] == cache.shape[2] == rank + rope == 576
    assert query.stride(3) == cache.stride(2) == 1
    assert 128 % cache.shape[1] == 0
    assert 1 <= query.shape[2] <= 128
    assert table.is_contiguous()
    assert {table.dtype, given["seq_lens"].dtype} == {torch.int32}
    assert given["workspace_buffer"].dtype == torch.int8
    assert given["seq_lens"].max() <= given["max_seq_len"]
    out = torch.full((*query.shape[:3], rank), float("nan"), dtype=query.dtype)
    for row, length in enumerate(given["seq_lens"].tolist()):
        key = torch.arange(length)
        seen = cache[table[row, key // cache.shape[1]].long(), key % cache.shape[1]].float()
        weights = (query[row, 0].float() @ seen.T * given["softmax_scale"]).softmax(-1)
        if length:
            out[row, 0] = (weights @ seen[:, :rank]).to(query.dtype)
    return out


@pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
def test_backend_conforms_over_a_mock_library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tokenspeed_mla")
    signatures = [each[DECODE] for each in SIGNATURES.values()]
    module.tokenspeed_mla_decode = restricted_to(decode, *signatures)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", module)
    assert check(TOKENSPEED_MLA, torch.device("cpu"), num_rows=(0, 1, 7)) >= 8


@pytest.mark.parametrize("block_size", [32, 64])
def test_library_runs_only_if_it_is_named(block_size: int) -> None:
    catalog = Catalog.discover()
    problem = {
        "phase": "decode",
        "num_heads": 128,
        "latent_size": 512,
        "rope_size": 64,
        "block_size": block_size,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    }
    for names in ((), ("tokenspeed_mla",)):
        selector = Selector(
            installed_kernels(catalog),
            PlatformInfo("cuda", (10, 0)),
            [Override.parse("attention.decode", names)] if names else [],
            ops=installed_ops(catalog),
            module_exists=lambda name: True,
        )
        taken = selector.select("mla_decode", problem).spec.backend
        assert (taken == "tokenspeed_mla") is bool(names)


@NEEDS_WHEEL
def test_library_has_the_recorded_signature_and_limits() -> None:
    (wheel,) = Path(WHEELS or "").glob("tokenspeed_mla-*.whl")
    assert {name: read(wheel, name) for name in SIGNATURES[library_of(wheel)]} == SIGNATURES[
        library_of(wheel)
    ]
    with zipfile.ZipFile(wheel) as archive:
        called = ast.unparse(ast.parse(archive.read("tokenspeed_mla/mla_decode_fp16.py")))
    assert "if L != 512 or R != 64:" in called
    assert "if mma_qk_tiler_mn[1] % page_size != 0 or page_size == 1:" in called
    assert "if H <= 0 or H > 128:" in called
