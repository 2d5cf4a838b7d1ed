"""The FlashInfer backend without its library: what it calls, and that the library takes it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import metadata
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_kernels_blackwell import FLASHINFER, flashinfer
from torch import Tensor

from tokenspeed_core.testing.attention import check_attention

HAS_LIBRARY = importlib.util.find_spec("flashinfer") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
DECODE, PREFILL = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"

COMMON = {
    "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "bmm1_scale", "bmm2_scale", "window_left",
    "out", "kv_layout", "backend", "multi_ctas_kv_counter_buffer",
}
GIVEN = {  # the arguments that the backend gives, by the library's file and function
    ("decode", DECODE): COMMON | {"max_seq_len", "q_len_per_req"},
    ("prefill", PREFILL): COMMON | {"max_q_len", "max_kv_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv"},
}


def attend(given: dict[str, Any], starts: list[int]) -> None:
    """Do what the library does with these arguments, by the definition; a row without keys gets zeros."""
    query, out, table, lengths = given["query"], given["out"], given["block_tables"], given["seq_lens"].tolist()
    assert (given["kv_layout"], given["backend"], given["bmm2_scale"]) == ("NHD", "trtllm-gen", 1.0)
    assert table.is_contiguous() and table.dtype == torch.int32 and out.is_contiguous() and out.shape == query.shape
    assert given["multi_ctas_kv_counter_buffer"].numel() >= len(lengths) * query.shape[1]
    assert not given["workspace_buffer"].any() and not given["multi_ctas_kv_counter_buffer"].any()
    k, v = given["kv_cache"]
    for (start, stop), length, blocks in zip(pairwise(starts), lengths, table, strict=True):
        key, position = torch.arange(length), torch.arange(start, stop)[:, None] - stop + length
        at = blocks[key // k.shape[1]].long(), key % k.shape[1]
        queries = query[start:stop].float().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("tkgd,lkd->tkgl", queries, k[at].float()) * given["bmm1_scale"]
        left = given["window_left"]
        hidden = (key > position) | ((key < position - left) & (left >= 0))
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1).nan_to_num()
        out[start:stop] = torch.einsum("tkgl,lkd->tkgd", weights, v[at].float()).flatten(1, 2).to(out.dtype)


def decode(**given: Any) -> Tensor:
    """Stand for the library's function of rows of one length."""
    assert given.keys() == GIVEN["decode", DECODE]
    count = given["q_len_per_req"]
    assert given["query"].shape[0] == count * len(given["seq_lens"])
    assert given["seq_lens"].max() <= given["max_seq_len"]
    attend(given, list(range(0, given["query"].shape[0] + 1, count)))
    return given["out"]


def prefill(**given: Any) -> Tensor:
    """Stand for the library's function of rows of any lengths."""
    assert given.keys() == GIVEN["prefill", PREFILL]
    starts = given["cum_seq_lens_q"].tolist()
    assert given["batch_size"] == len(given["seq_lens"]) and given["seq_lens"].max() <= given["max_kv_len"]
    assert max(stop - start for start, stop in pairwise(starts)) <= given["max_q_len"]
    assert given["cum_seq_lens_kv"].tolist() == [0, *accumulate(given["seq_lens"].tolist())]
    assert given["cum_seq_lens_kv"].dtype == given["cum_seq_lens_q"].dtype == torch.int32
    attend(given, starts)
    return given["out"]


def module(name: str, **content: Callable[..., Any]) -> ModuleType:
    """Make a module of functions."""
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


@pytest.mark.skipif(HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU")
def test_over_functions_that_compute_the_definition_the_backend_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    for name, content in ((".decode", {DECODE: decode}), (".prefill", {PREFILL: prefill}), ("", {})):
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", module(f"flashinfer{name}", **content))
    halves = replace(FLASHINFER, capability=replace(FLASHINFER.capability, head_sizes=(64,)))
    assert check_attention(halves, torch.device("cpu")) > 20


def test_the_library_is_an_extra_so_that_the_plugin_installs_on_any_machine() -> None:
    about = metadata("tokenspeed-kernels-blackwell")
    assert about.get_all("Provides-Extra") == ["flashinfer"]
    needed = [line for line in about.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert sorted(re.split(r"[^\w-]", line)[0] for line in needed) == ["tokenspeed-core", "torch", "triton"]


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
@pytest.mark.parametrize(("file", "function"), GIVEN)
def test_the_librarys_own_functions_take_the_arguments_that_the_backend_gives(file: str, function: str) -> None:
    (wheel,) = Path(WHEELS or "").glob("flashinfer_python-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(f"flashinfer/{file}.py"))
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    names = [argument.arg for argument in found.args.args]
    required = set(names[: len(names) - len(found.args.defaults)])
    assert required <= GIVEN[file, function] <= set(names)
    assert not found.args.kwonlyargs
