"""The FlashInfer backends over a mock of the library, and their calls against its recorded signatures."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
from tokenspeed_kernels_blackwell import FLASHINFER, FLASHINFER_MLA
from tokenspeed_kernels_blackwell.attention import trtllm
from tokenspeed_kernels_blackwell.mla import flashinfer as flashinfer_mla
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.conformance import check, make_inputs
from tokenspeed_testing.shapes import contract_of, problems
from tokenspeed_testing.signatures import kept, library_of, parsed, read, restricted_to
from torch import Tensor

from tokenspeed_core.api import KernelSpec

HAS_LIBRARY = importlib.util.find_spec("flashinfer") is not None
WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
DECODE, PREFILL = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
LATENT = "trtllm_batch_decode_with_kv_cache_mla"

COMMON = {
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "bmm1_scale",
    "bmm2_scale",
    "window_left",
    "out",
    "kv_layout",
    "backend",
    "multi_ctas_kv_counter_buffer",
}
GIVEN = {  # arguments that the backend passes, by file and function of the library
    ("decode", DECODE): COMMON | {"max_seq_len", "q_len_per_req"},
    ("prefill", PREFILL): COMMON
    | {"max_q_len", "max_kv_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv"},
    ("mla/_core", LATENT): COMMON - {"window_left", "out", "kv_layout"}
    | {
        "max_seq_len",
        "qk_nope_head_dim",
        "kv_lora_rank",
        "qk_rope_head_dim",
    },
}


def attend(given: dict[str, Any], starts: list[int]) -> None:
    """Compute the library's result for these arguments; rows without keys get zeros."""
    query, out, table, lengths = (
        given["query"],
        given["out"],
        given["block_tables"],
        given["seq_lens"].tolist(),
    )
    assert (given["kv_layout"], given["backend"], given["bmm2_scale"]) == ("NHD", "trtllm-gen", 1.0)
    assert (
        table.is_contiguous()
        and table.dtype == torch.int32
        and out.is_contiguous()
        and out.shape == query.shape
    )
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
        out[start:stop] = (
            torch.einsum("tkgl,lkd->tkgd", weights, v[at].float()).flatten(1, 2).to(out.dtype)
        )


def decode(**given: Any) -> Tensor:
    """Stand in for the library's decode function."""
    assert given.keys() == GIVEN["decode", DECODE]
    count = given["q_len_per_req"]
    assert given["query"].shape[0] == count * len(given["seq_lens"])
    assert given["seq_lens"].max() <= given["max_seq_len"]
    attend(given, list(range(0, given["query"].shape[0] + 1, count)))
    return given["out"]


def prefill(**given: Any) -> Tensor:
    """Stand in for the library's prefill function."""
    assert given.keys() == GIVEN["prefill", PREFILL]
    starts = given["cum_seq_lens_q"].tolist()
    assert (
        given["batch_size"] == len(given["seq_lens"])
        and given["seq_lens"].max() <= given["max_kv_len"]
    )
    assert max(stop - start for start, stop in pairwise(starts)) <= given["max_q_len"]
    assert given["cum_seq_lens_kv"].tolist() == [0, *accumulate(given["seq_lens"].tolist())]
    assert given["cum_seq_lens_kv"].dtype == given["cum_seq_lens_q"].dtype == torch.int32
    attend(given, starts)
    return given["out"]


def decode_latents(**given: Any) -> Tensor:
    """Stand in for the library's MLA function. Rows without keys get NaN, because their result is undocumented."""
    assert given.keys() == GIVEN["mla/_core", LATENT]
    query, cache, table, lengths = (
        given["query"],
        given["kv_cache"],
        given["block_tables"],
        given["seq_lens"],
    )
    rank, rope, size = given["kv_lora_rank"], given["qk_rope_head_dim"], cache.shape[1]
    assert (given["backend"], given["bmm2_scale"], rank, rope) == ("trtllm-gen", 1.0, 512, 64)
    assert (
        query.shape[1] == 1 and query.shape[3] == cache.shape[2] == rank + rope and size in (32, 64)
    )
    assert query.dtype == cache.dtype == torch.bfloat16, "the library returns bfloat16"
    assert (
        table.is_contiguous()
        and table.dtype == lengths.dtype == torch.int32
        and lengths.is_contiguous()
    )
    assert lengths.max() <= given["max_seq_len"]
    assert given["multi_ctas_kv_counter_buffer"].numel() >= query.shape[0] * query.shape[2]
    assert not given["workspace_buffer"].any() and not given["multi_ctas_kv_counter_buffer"].any()
    out = torch.full((*query.shape[:3], rank), float("nan"), dtype=torch.bfloat16)
    for row, length in enumerate(lengths.tolist()):
        key = torch.arange(length)
        seen = cache[table[row, key // size].long(), key % size].float()
        weights = (query[row, 0].float() @ seen.T * given["bmm1_scale"]).softmax(-1)
        out[row, 0] = (weights @ seen[:, :rank]).bfloat16() if length else float("nan")
    return out


def of_library(file: str, mock_library: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a mock that accepts only calls that are valid in every recorded version."""
    (function,) = (function for where, function in GIVEN if where == file)
    return restricted_to(
        mock_library, *(each[f"flashinfer/{file}.py:{function}"] for each in SIGNATURES.values())
    )


def module(name: str, **content: Callable[..., Any]) -> ModuleType:
    """Return a module with these attributes."""
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


@pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
def test_attention_conforms_over_a_mock_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trtllm, "WORKSPACE_BYTES", 1024)
    mocks = {DECODE: of_library("decode", decode), PREFILL: of_library("prefill", prefill)}
    for name, content in ((".decode", mocks), (".prefill", mocks), ("", {})):
        monkeypatch.setitem(
            sys.modules, f"flashinfer{name}", module(f"flashinfer{name}", **content)
        )
    halves = replace(FLASHINFER, capability=replace(FLASHINFER.capability, head_sizes=(64,)))
    assert check_attention(halves, torch.device("cpu")) > 20


@pytest.mark.skipif(
    HAS_LIBRARY, reason="the library itself is installed, and it computes nothing on a CPU"
)
@pytest.mark.parametrize("spec", FLASHINFER_MLA, ids=("up to 64 heads", "128 heads"))
def test_mla_decode_conforms_over_a_mock_library(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_mla, "WORKSPACE_BYTES", 1024)
    for name, content in ((".mla", {LATENT: of_library("mla/_core", decode_latents)}), ("", {})):
        monkeypatch.setitem(
            sys.modules, f"flashinfer{name}", module(f"flashinfer{name}", **content)
        )
    assert check(spec, torch.device("cpu")) >= 8
    problem = next(problems(spec))
    rows = make_inputs(contract_of(spec), problem, 1, torch.device("cpu"), strided=False)
    rows["q"] = rows["q"].expand(flashinfer_mla.MAX_ROWS + 1, -1, -1)
    with pytest.raises(ValueError, match="4096 rows, got 4097"):
        spec.factory()(problem)(*rows.values())


def definitions(file: str, *names: str) -> list[ast.stmt]:
    """Return the top-level definitions of these names in a file of the library's wheel, in order."""
    (wheel,) = Path(WHEELS or "").glob("flashinfer_python-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(f"flashinfer/{file}.py"))
    found = {
        target.id if isinstance(target, ast.Name) else "": node
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    } | {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return sorted((found[name] for name in names), key=lambda node: node.lineno)


NEEDS_WHEEL = pytest.mark.skipif(
    WHEELS is None, reason="`nox -s vendors` downloads the library, which is large"
)


@NEEDS_WHEEL
def test_library_accepts_declared_mla_shapes() -> None:
    kinds = [f"{kind}_mla_dimensions" for kind in ("deepseek", "smaller", "nope")]
    body = definitions("utils", "_check_block_tables_shape")
    body += definitions(
        "mla/_core",
        "MLAHeadDimensions",
        *kinds,
        "supported_mla_head_dimensions",
        "_check_trtllm_gen_mla_shape",
    )
    library: dict[str, Any] = {"torch": torch, "Optional": Optional, "dataclass": dataclass}
    exec(compile(ast.Module(body, []), "flashinfer", "exec"), library)
    for spec in FLASHINFER_MLA:
        for problem in problems(spec):
            given = make_inputs(contract_of(spec), problem, 7, torch.device("cpu"), strided=True)
            cache = library["_check_trtllm_gen_mla_shape"](
                given["q"].unsqueeze(1),
                given["cache"],
                512,
                64,
                0,
                given["block_table"],
                problem["block_size"],
                require_aligned_block_table=False,
            )
            assert cache.shape == given["cache"].unsqueeze(1).shape


@NEEDS_WHEEL
def test_library_rejects_undeclared_mla_shapes() -> None:
    (called,) = definitions("mla/_core", f"_{LATENT}_impl")
    conditions = {
        ast.unparse(node.test): ast.unparse(node)
        for node in ast.walk(called)
        if isinstance(node, ast.If)
    }
    assert "not_supported_reason = " in conditions["64 < num_heads_q < 128"]
    assert "not_supported_reason = " in conditions["block_size != 32 and block_size != 64"]
    assert "raise ValueError(trtllm_gen_not_supported_reason)" in ast.unparse(called)
    limits = [
        limit
        for spec in FLASHINFER_MLA
        for limit in spec.capability.limits
        if limit.axis == "num_heads"
    ]
    assert [(limit.minimum, limit.maximum) for limit in limits] == [(1, 64), (128, 128)]
    assert {spec.capability.block_sizes for spec in FLASHINFER_MLA} == {(32, 64)}


@pytest.mark.parametrize("library", SIGNATURES)
@pytest.mark.parametrize(("file", "function"), GIVEN)
def test_library_accepts_our_arguments(file: str, function: str, library: str) -> None:
    parameters = parsed(SIGNATURES[library][f"flashinfer/{file}.py:{function}"]).parameters.values()
    required = {each.name for each in parameters if each.default is each.empty}
    assert required <= GIVEN[file, function] <= {each.name for each in parameters}


@NEEDS_WHEEL
def test_library_has_the_recorded_signatures() -> None:
    (wheel,) = Path(WHEELS or "").glob("flashinfer_python-*.whl")
    assert {name: read(wheel, name) for name in SIGNATURES[library_of(wheel)]} == SIGNATURES[
        library_of(wheel)
    ]
