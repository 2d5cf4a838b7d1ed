"""The FlashAttention-3 backend over a mock of the library, and its calls against the recorded signatures."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_kernels_hopper import FA3, FA3_SCORES
from tokenspeed_kernels_hopper.fa3 import MIN_QUERIES, MIN_TOKENS, gathering_pays
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.explain import explain
from tokenspeed_testing.signatures import kept, library_of, read
from torch import Tensor

from tokenspeed_core.api import AttentionProblem, AttentionStep, KernelSpec, PlatformInfo
from tokenspeed_core.kernels.installed import (
    installed_kernels,
    installed_ops,
    installed_rankings,
)
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

HAS_LIBRARY = importlib.util.find_spec("flash_attn_interface") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))

USED = (  # arguments that the backend passes or leaves at these defaults, in the library's order
    "Tensor q",
    "Tensor k",
    "Tensor v",
    "Tensor(out!)? out = None",
    "Tensor? cu_seqlens_q = None",
    "Tensor? cu_seqlens_k = None",
    "Tensor? seqused_k = None",
    "int? max_seqlen_q = None",
    "int? max_seqlen_k = None",
    "Tensor? page_table = None",
    "float? softmax_scale = None",
    "bool is_causal = False",
    "int window_size_left = -1",
    "int window_size_right = -1",
    "int attention_chunk = 0",
    "int num_splits = 0",
    "Tensor? sinks = None",
)
RESULT = "(Tensor(out!), Tensor, Tensor, Tensor)"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    page_table: Tensor,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    num_splits: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the result of the library's op for these arguments; rows without keys get zeros."""
    assert is_causal and window_size_right == 0
    assert not attention_chunk or window_size_left == -1, "chunks are not combined with windows"
    assert sinks is None or sinks.dtype == torch.bfloat16, "the library requires it"
    assert cu_seqlens_k is max_seqlen_k is None, "keys are gathered on a device alone"
    assert page_table.shape[0] == seqused_k.shape[0] == cu_seqlens_q.shape[0] - 1
    assert {cu_seqlens_q.dtype, seqused_k.dtype, page_table.dtype} == {torch.int32}
    assert cu_seqlens_q.is_contiguous() and seqused_k.is_contiguous() and page_table.stride(-1) == 1
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for (start, stop), length, blocks in zip(pairwise(starts), lengths, page_table, strict=True):
        assert stop - start <= max_seqlen_q
        key, position = torch.arange(length), torch.arange(start, stop)[:, None] - stop + length
        at = blocks[key // k.shape[1]].long(), key % k.shape[1]
        queries = q[start:stop].float().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("tkgd,lkd->tkgl", queries, k[at].float()) * softmax_scale
        hidden = (key > position) | ((key < position - window_size_left) & (window_size_left >= 0))
        if attention_chunk:
            hidden |= key < position // attention_chunk * attention_chunk
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        if sinks is not None:
            column = sinks.float().view(1, k.shape[2], -1, 1).expand(len(scores), -1, -1, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1).nan_to_num()[..., :length]
        out[start:stop] = (
            torch.einsum("tkgl,lkd->tkgd", weights, v[at].float()).flatten(1, 2).to(out.dtype)
        )
    return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)


@pytest.fixture
def mock_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register a mock op with the library's name and arguments."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    ops = torch.library.Library("flash_attn_3", "DEF")
    ops.define(f"fwd({', '.join(USED)}) -> {RESULT}")
    ops.impl("fwd", attend, "CPU")
    yield
    ops._destroy()


@pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
@pytest.mark.usefixtures("mock_library")
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(FA3, id="plain"),
        pytest.param(FA3_SCORES, id="scores", marks=pytest.mark.release),
    ],
)
def test_backend_conforms_over_a_mock_library(spec: KernelSpec) -> None:
    some_sizes = replace(spec, capability=replace(spec.capability, head_sizes=(64, 128)))
    assert check_attention(some_sizes, torch.device("cpu")) > 20


@pytest.mark.parametrize("changes", [{"has_sinks": True}, {"window": 128, "is_chunked": True}])
def test_sinks_and_chunks_run_only_by_name(changes: dict[str, Any]) -> None:
    plain = AttentionProblem("prefill", 64, 8, 64, "bfloat16", "bfloat16", 16, 0.125, None)
    catalog = Catalog.discover()

    def taken(problem: AttentionProblem, *names: str) -> str:
        selector = Selector(
            installed_kernels(catalog),
            PlatformInfo("cuda", (9, 0)),
            [Override.parse("attention", names)] if names else [],
            ops=installed_ops(catalog),
            rankings=installed_rankings(catalog),
            module_exists=lambda name: name != "flashinfer",
        )
        with pytest.MonkeyPatch.context() as patch:  # the library is not loaded
            patch.setattr(Selector, "_load_failure", lambda *given: ())
            return selector.select_attention(problem).spec.backend

    assert taken(plain) == "fa3"
    assert taken(replace(plain, **changes)) == "triton"
    assert taken(replace(plain, **changes), "fa3") == "fa3"


def test_library_that_does_not_load_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tokenspeed_kernels_hopper.load_fa3", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    problem = AttentionProblem("prefill", 64, 8, 64, "bfloat16", "bfloat16", 16, 0.125, None)
    catalog = Catalog.discover()
    selector = Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", (9, 0)),
        ops=installed_ops(catalog),
        rankings=installed_rankings(catalog),
        module_exists=lambda name: name != "flashinfer",
    )
    assert selector.select_attention(problem).spec.backend == "triton"
    assert "it does not load" in explain(selector.plan(), "attention")


@pytest.mark.parametrize(
    ("num_queries", "lengths", "expected"),
    [
        ((4096, 4096), (4096, 4096), True),
        ((512,) * 16, (512,) * 16, False),
        ((MIN_TOKENS,), (MIN_TOKENS,), True),
        ((MIN_TOKENS - 1,), (60_000,), False),
        ((MIN_QUERIES,) * 3, (60_000,) * 3, False),
        ((MIN_QUERIES + 20,) * 3, (60_000,) * 3, True),
        ((1, 8000), (200, 50_000), True),
        ((1, 1, 1), (50_000, 50_000, 8), False),
    ],
)
def test_keys_are_gathered_for_long_prompts_only(
    num_queries: tuple[int, ...], lengths: tuple[int, ...], expected: bool
) -> None:
    some, starts = torch.zeros(0, dtype=torch.int32), (0, *accumulate(num_queries))
    step = AttentionStep(
        len(lengths), starts[-1], max(num_queries), max(lengths), some, some, some, starts, lengths
    )
    assert gathering_pays(step) == expected
    assert not gathering_pays(replace(step, host_query_start=None, host_seq_lens=None))


@pytest.mark.parametrize("library", SIGNATURES)
def test_library_accepts_our_arguments(library: str) -> None:
    arguments, _, result = (
        SIGNATURES[library]["flash_attn_3/_C.abi3.so:fwd"].removeprefix("(").partition(") -> ")
    )
    assert [argument for argument in arguments.split(", ") if argument in USED] == list(USED)
    assert result == RESULT


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_has_the_recorded_signatures() -> None:
    (wheel,) = Path(WHEELS or "").glob("*fa3-*.whl")
    assert "flash_attn_interface.py" in zipfile.ZipFile(wheel).namelist()
    assert {name: read(wheel, name) for name in SIGNATURES[library_of(wheel)]} == SIGNATURES[
        library_of(wheel)
    ]
