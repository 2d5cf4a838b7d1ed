"""The backend over a mock of the library, and its calls against the recorded signatures."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from tokenspeed_kernels_flashinfer import ATTENTION, attention, compiled
from tokenspeed_kernels_flashinfer.cascade import shared_blocks
from tokenspeed_kernels_flashinfer.options import FlashInferOptions
from tokenspeed_testing.attention import (
    Fixture,
    Rows,
    attend,
    check_attention,
    limits_of,
    make_fixture,
)
from tokenspeed_testing.signatures import kept, library_of, parsed, read, restricted_to
from torch import Tensor

from tokenspeed_core.api.attention import AttentionProblem

HAS_LIBRARY = importlib.util.find_spec("flashinfer") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
WRAPPER, MERGE = "BatchPrefillWithPagedKVCacheWrapper", "merge_state_in_place"
PREFILL = f"flashinfer/prefill.py:{WRAPPER}"
BUFFERS = {
    "qo_indptr_buf",
    "paged_kv_indptr_buf",
    "paged_kv_indices_buf",
    "paged_kv_last_page_len_buf",
}
GIVEN = {  # arguments that the backend passes, by method of the library
    "__init__": {"float_workspace_buffer", "kv_layout", "use_cuda_graph", "backend", *BUFFERS},
    "reset_workspace_buffer": {"float_workspace_buffer", "int_workspace_buffer"},
    "plan": {
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "page_size",
        "causal",
        "sm_scale",
        "window_left",
        "logits_soft_cap",
        "q_data_type",
        "kv_data_type",
        "disable_split_kv",
    },
    "run": {"q", "paged_kv_cache", "out", "lse", "return_lse"},
}


class Wrapper:
    """Stand-in for the library's wrapper class that computes attention by definition."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool,
        backend: str,
        **buffers: Tensor,
    ) -> None:
        assert (
            kv_layout == "NHD" and backend in ("auto", "fa2") and not float_workspace_buffer.any()
        )
        assert buffers.keys() == (BUFFERS if use_cuda_graph else set())
        self.is_fixed = use_cuda_graph
        self.buffers = buffers
        self.max_num_tokens = 0
        self.num_plans = 0
        self._pin_memory_int_workspace_buffer = torch.ones(0)
        self.made.append(self)

    def reset_workspace_buffer(self, partial: Tensor, schedule: Tensor) -> None:
        assert partial.dtype == schedule.dtype == torch.uint8 and len(schedule) >= 65536
        self._pin_memory_int_workspace_buffer = torch.ones_like(schedule)

    def plan(
        self,
        starts: Tensor,
        block_start: Tensor,
        blocks: Tensor,
        last: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        **named: Any,
    ) -> None:
        assert not self._pin_memory_int_workspace_buffer.any(), (
            "the library does not write tokens outside the plan"
        )
        assert {*named} == GIVEN["plan"] - {
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim_qk",
            "page_size",
        }
        given = starts, block_start, blocks, last
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in given)
        assert len(starts) == len(block_start) == len(last) + 1 and block_start[-1] == len(blocks)
        assert (
            (block_start[1:] > block_start[:-1]) == (last > 0)
        ).all() and last.max() <= block_size
        if self.is_fixed:
            assert len(self.buffers["qo_indptr_buf"]) == len(starts), "rows are fixed"
            self.max_num_tokens = self.max_num_tokens or int(starts[-1])
            assert starts[-1] <= self.max_num_tokens, "the first plan must be the largest"
            for buffer, each in zip(self.buffers.values(), given, strict=True):
                buffer[: len(each)].copy_(each)
            given = tuple(
                buffer[: len(each)]
                for buffer, each in zip(self.buffers.values(), given, strict=True)
            )
        self.given, self.named, self.shape = given, named, (num_heads, num_kv_heads, head_size)
        self.num_plans += 1

    def run(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        (starts, block_start, blocks, last), named = self.given, self.named
        assert (
            len(q) == starts[-1]
            and out.shape == q.shape
            and out.is_contiguous()
            and (lse is None) != return_lse
        )
        k, v = caches
        assert k.stride() == v.stride() and self.shape == (q.shape[1], *k.shape[2:])
        assert (q.dtype, k.dtype) == (named["q_data_type"], named["kv_data_type"])
        weights_of = torch.full(q.shape[:2], float("-inf"))
        for row, ((start, stop), (first, end)) in enumerate(
            zip(pairwise(starts), pairwise(block_start), strict=True)
        ):
            length = (end - first - 1) * k.shape[1] + last[row] if end > first else 0
            key, position = torch.arange(length), torch.arange(start, stop)[:, None] - stop + length
            at = blocks[first + key // k.shape[1]].long(), key % k.shape[1]
            queries = q[start:stop].float().unflatten(1, (k.shape[2], -1))
            scores = torch.einsum("tkgd,lkd->tkgl", queries, wide(k)[at]) * named["sm_scale"]
            if cap := named["logits_soft_cap"]:
                scores = cap * torch.tanh(scores / cap)
            left = named["window_left"]
            hidden = ((key > position) & named["causal"]) | ((key < position - left) & (left >= 0))
            scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
            attended = torch.einsum("tkgl,lkd->tkgd", scores.softmax(-1).nan_to_num(), wide(v)[at])
            out[start:stop] = attended.flatten(1, 2).to(out.dtype)
            weights_of[start:stop] = scores.logsumexp(-1).flatten(1, 2) * 1.4426950408889634
        if lse is not None:
            lse.copy_(weights_of)


def wide(cache: Tensor) -> Tensor:
    """Return a cache in float32, because torch cannot index FP8."""
    return cache.float()


def merge(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor) -> None:
    """Stand in for the library's merge: rows without keys on both sides become NaN, unless masked."""
    assert mask.dtype == torch.uint8 and mask.shape == v.shape[:1] and v.shape == v_other.shape
    highest = torch.maximum(s, s_other)
    ours, others = torch.exp2(s - highest), torch.exp2(s_other - highest)
    share = (ours / (ours + others))[..., None]
    v.copy_(
        torch.where(
            mask[:, None, None] > 0, share * v.float() + (1 - share) * v_other.float(), v
        ).to(v.dtype)
    )


@pytest.fixture
def mock_library(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    """Install mocks of the library's modules."""
    for method in GIVEN:
        signatures = (each[f"{PREFILL}.{method}"] for each in SIGNATURES.values())
        monkeypatch.setattr(Wrapper, method, restricted_to(getattr(Wrapper, method), *signatures))
    merges = restricted_to(
        merge, *(each[f"flashinfer/cascade.py:{MERGE}"] for each in SIGNATURES.values())
    )
    content = {
        "flashinfer": {},
        "flashinfer.prefill": {WRAPPER: Wrapper},
        "flashinfer.cascade": {MERGE: merges},
    }
    for name, functions in content.items():
        made = ModuleType(name)
        made.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(attention, "MIN_WORKSPACE", 1024)
    monkeypatch.setattr(Wrapper, "made", [])
    return Wrapper


ON_CPU = pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
HALVES = AttentionProblem("decode", 8, 2, 64, "bfloat16", "bfloat16", 16, 64**-0.5, None)
SHARING = Rows((1,) * 11, (400, 325, 340, 700, 321, 333, 322, 350, 399, 321, 0), num_shared=320)


@ON_CPU
@pytest.mark.usefixtures("mock_library")
def test_backend_conforms_over_a_mock_library() -> None:
    spec = ATTENTION[-1]
    small = replace(
        spec, capability=replace(spec.capability, head_sizes=(64,), block_sizes=(16, 32))
    )
    assert check_attention(small, torch.device("cpu")) > 20


def without_host(fixture: Fixture) -> Fixture:
    """Return a fixture without host-side lengths, as in a captured step."""
    return replace(fixture, step=replace(fixture.step, host_query_start=None, host_seq_lens=None))


@ON_CPU
def test_shared_prefix_is_read_once(
    mock_library: type[Wrapper],
) -> None:
    fixture = make_fixture(HALVES, SHARING, torch.device("cpu"), seed=0)
    kernel = ATTENTION[-1].factory()(HALVES, limits_of(fixture), torch.device("cpu"))
    found = attend(kernel, without_host(fixture))
    own, common = mock_library.made
    assert common.given[1].tolist() == [0, 20] and not common.named["causal"]
    assert own.given[1].diff().tolist() == [5, 1, 2, 24, 1, 1, 1, 2, 5, 1, 0]
    torch.testing.assert_close(found[:10].float(), fixture.expected[:10], rtol=3e-2, atol=3e-2)
    assert not found.isnan().any()


@ON_CPU
def test_option_disables_sharing(mock_library: type[Wrapper]) -> None:
    fixture = make_fixture(HALVES, SHARING, torch.device("cpu"), seed=0)
    factory = ATTENTION[-1].factory(FlashInferOptions(shared_prefix=False))
    attend(factory(HALVES, limits_of(fixture), torch.device("cpu")), fixture)
    (own,) = mock_library.made
    assert own.given[1].diff().tolist() == [25, 21, 22, 44, 21, 21, 21, 22, 25, 21, 0]


@ON_CPU
def test_captured_step_is_replanned_in_the_same_buffers(
    mock_library: type[Wrapper],
) -> None:
    problem = replace(HALVES, phase="prefill")
    scenes = [
        make_fixture(problem, rows, torch.device("cpu"), seed=seed, max_len=256)
        for seed, rows in enumerate((Rows((9, 5, 2), (20, 5, 40)), Rows((1, 12, 3), (200, 90, 3))))
    ]
    kernel = ATTENTION[-1].factory()(problem, limits_of(scenes[0]), torch.device("cpu"))
    for fixture in map(without_host, scenes):
        step = replace(fixture.step, max_num_query=16)
        found = attend(kernel, replace(fixture, step=step))
        torch.testing.assert_close(found.float(), fixture.expected, rtol=3e-2, atol=3e-2)
    (own,) = mock_library.made
    assert own.num_plans == 2 and own.is_fixed


@ON_CPU
def test_padding_tokens_get_zeros(mock_library: type[Wrapper]) -> None:
    problem = replace(HALVES, phase="prefill")
    fixture = without_host(
        make_fixture(problem, Rows((9, 5), (20, 5)), torch.device("cpu"), seed=0)
    )
    kernel = ATTENTION[-1].factory()(problem, limits_of(fixture), torch.device("cpu"))
    fixture.step.query_start.copy_(torch.tensor([0, 9, 9], dtype=torch.int32))
    fixture.step.seq_lens[1] = 0
    found = attend(kernel, fixture)
    torch.testing.assert_close(found[:9].float(), fixture.expected[:9], rtol=3e-2, atol=3e-2)
    assert not found[9:].any()
    assert len(mock_library.made) == 1


@pytest.mark.parametrize(
    ("lengths", "tables", "expected"),
    [
        ([400] * 9 + [0], [[*range(25), row] for row in range(10)], 24),
        ([400] * 8 + [0, 0], [list(range(26))] * 10, 0),
        ([400] * 9 + [257], [list(range(26))] * 10, 16),
        ([400] * 9 + [256], [list(range(26))] * 10, 0),
    ],
    ids=[
        "each row keeps an unshared key",
        "too few rows",
        "the shortest row decides",
        "too few keys",
    ],
)
def test_shared_blocks_are_leading_blocks_of_all_rows(
    lengths: list[int], tables: list[list[int]], expected: int
) -> None:
    given = torch.tensor(lengths, dtype=torch.int32), torch.tensor(tables, dtype=torch.int32)
    assert shared_blocks(*given, 16).tolist() == [expected, 0]


def source(path: str) -> ast.Module:
    """Return the syntax tree of a file in the library's wheel."""
    (wheel,) = Path(WHEELS or "").glob("flashinfer_python-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return ast.parse(archive.read(f"flashinfer/{path}"))


def functions_in(path: str, name: str) -> list[ast.FunctionDef]:
    """Return the functions with this name in a file of the library's wheel."""
    return [
        node
        for node in source(path).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]


def library_class() -> dict[str, ast.FunctionDef]:
    """Return the methods of the library's class in its wheel by name; the last of overloads."""
    tree = source("prefill.py")
    (found,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == WRAPPER
    )
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("library", SIGNATURES)
@pytest.mark.parametrize("method", GIVEN)
def test_library_accepts_our_arguments(library: str, method: str) -> None:
    _, *parameters = parsed(SIGNATURES[library][f"{PREFILL}.{method}"]).parameters.values()
    named = [each for each in parameters if each.kind is not each.VAR_POSITIONAL]
    required = {each.name for each in named if each.default is each.empty}
    assert required <= GIVEN[method] <= {each.name for each in named}
    positional = {"plan": 8, "run": 2, "reset_workspace_buffer": 2, "__init__": 2}[method]
    assert {each.name for each in named[:positional]} <= GIVEN[method]


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_has_the_recorded_signatures() -> None:
    (wheel,) = Path(WHEELS or "").glob("flashinfer_python-*.whl")
    assert {name: read(wheel, name) for name in SIGNATURES[library_of(wheel)]} == SIGNATURES[
        library_of(wheel)
    ]


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_loads_the_expected_modules() -> None:
    (loads,) = functions_in("prefill.py", "get_batch_prefill_module")
    made = {
        node.func.id
        for node in ast.walk(loads)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {name for name in made if "gen_batch_prefill" in name} == {"gen_batch_prefill_module"}
    known = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.int32: "i32"}
    (named,) = functions_in("jit/attention/modules.py", "get_batch_prefill_uri")
    names: dict[str, Any] = {
        "torch": torch,
        "filename_safe_dtype_map": known,
        "filename_safe_dtype_map_kv": known.get,
    }
    exec(ast.unparse(named), names)  # a pure function from the wheel that builds a module name
    types = torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, torch.int32
    name = names[named.name]("fa2", *types, 128, 128, 0, True, False, False)
    match = compiled._NAME.match(name)
    assert match is not None
    assert match.groupdict() == {
        "q": "bf16",
        "kv": "e4m3",
        "size": "128",
        "window": "True",
        "hopper": None,
    }
    hopper = names[named.name]("fa3", *types, 128, 128, 0, True, False, False)
    assert hopper == f"{name}_sm90"


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_plans_in_the_cleared_buffer() -> None:
    methods = library_class()
    name = "self._pin_memory_int_workspace_buffer"
    assert name in ast.unparse(methods["reset_workspace_buffer"]) and name in ast.unparse(
        methods["plan"]
    )
