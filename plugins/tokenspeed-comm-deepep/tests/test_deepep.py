"""The DeepEP backend over a mock of the library, in two threads, its selection, and its recorded signatures."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenspeed_comm_deepep.exchange import exchange_tokens
from tokenspeed_comm_deepep.options import DeepEPOptions
from tokenspeed_testing.signatures import kept, library_of, read, restricted_to
from torch import Tensor

from tokenspeed_core.api import CommGroup, PlatformInfo, ProcessGroup, TokenCounts
from tokenspeed_core.config import Config
from tokenspeed_core.engine.backends import read_overrides
from tokenspeed_core.errors import ConfigError, SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

WHEELS = os.environ.get("TOKENSPEED_VENDOR_WHEELS")
SIGNATURES = kept(Path(__file__).with_name("signatures.json"))
NUM_EXPERTS, TOP_K, SIZE = 6, 2, 128
SETTINGS = {
    "model": "demo",
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "all2all_backend": "deepep",
}


class Link:
    """What two threads send to each other."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._sent: list[Any] = [None, None]

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Return the values of both, in rank order."""
        self._sent[rank] = value
        self._barrier.wait()
        both = list(self._sent)
        self._barrier.wait()
        return both


class Buffer:
    """The library's class for two processes: rows are ordered by the process that sent them."""

    def __init__(self, group: tuple[int, Link], num_nvl_bytes: int) -> None:
        assert num_nvl_bytes == 2 * 2 * SIZE + 7, "the larger of two sizes"
        self._rank, self._link = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        assert num_ranks in (2, 4, 8)
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row, ranks: row * ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row, ranks: row * ranks + 7)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        owner = topk_idx // (num_experts // 2)
        is_sent = torch.stack([(owner == rank).any(1) for rank in range(2)], 1)
        return is_sent.sum(0), None, torch.bincount(topk_idx.flatten()), is_sent, None

    def dispatch(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: Tensor,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_worst_tokens: int,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert topk_weights.dtype == torch.float32
        rows = [is_token_in_rank[:, rank].nonzero()[:, 0] for rank in range(2)]
        mine = [(x[each], topk_idx[each], topk_weights[each]) for each in rows]
        both = self._link.swap(self._rank, mine)
        received = [sent[self._rank] for sent in both]
        found, ids, weights = (torch.cat(each) for each in zip(*received, strict=True))
        num_local = NUM_EXPERTS // 2
        ids = ids - self._rank * num_local
        is_other = (ids < 0) | (ids >= num_local)
        ids, weights = ids.masked_fill(is_other, -1), weights.masked_fill(is_other, 0)
        padding = num_worst_tokens - len(found)
        assert padding >= 0
        pad = torch.nn.functional.pad
        found, weights = (
            pad(each, (0, 0, 0, padding), value=float("nan")) for each in (found, weights)
        )
        handle = rows, [len(each[0]) for each in received], len(x)
        return found, pad(ids, (0, 0, 0, padding), value=-1), weights, [], handle, None

    def combine(self, x: Tensor, handle: Any) -> tuple[Any, ...]:
        rows, num_received, num_tokens = handle
        parts = x[: sum(num_received)].split(num_received)
        back = [sent[self._rank] for sent in self._link.swap(self._rank, parts)]
        total = torch.zeros(num_tokens, x.shape[1])
        for index, part in zip(rows, back, strict=True):
            total.index_add_(0, index, part.float())
        return total.to(x.dtype), None, None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the mock, which takes the recorded arguments only."""
    checked = type("Buffer", (Buffer,), {})
    for name in ("__init__", "get_dispatch_layout", "dispatch", "combine"):
        recorded = (
            each[f"deep_ep/buffers/legacy.py:Buffer.{name}"] for each in SIGNATURES.values()
        )
        setattr(checked, name, restricted_to(getattr(Buffer, name), *recorded))
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=checked))


def scaled(rank: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Compute this process's experts, of which expert e multiplies by e + 1."""
    assert ids.dtype == torch.int32
    is_own = ids % 2 != rank
    factors = torch.where(is_own, weights * (ids + 1), 0.0)
    return (torch.nan_to_num(x.float()) * factors.sum(1, keepdim=True)).to(x.dtype)


@pytest.mark.usefixtures("library")
def test_tokens_meet_their_experts() -> None:
    link, counts = Link(), (5, 1)

    def run(rank: int) -> None:
        tokens = TokenCounts(2)
        handle: Any = (rank, link)
        problem = {"num_processes": 2, "num_nodes": 1, "size": SIZE, "dtype": "bfloat16"}
        group = CommGroup(ProcessGroup("data", rank, (0, 1)), handle, tokens)
        exchange = exchange_tokens(problem, group, options=DeepEPOptions())
        generator = torch.Generator().manual_seed(rank)
        owners = torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.int32)
        for each in (counts, counts[::-1]):
            tokens.begin(each)
            x = torch.randn(each[rank], SIZE, generator=generator).bfloat16()
            weights = torch.rand(each[rank], TOP_K, generator=generator)
            ids = torch.rand(each[rank], NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
            found = exchange(x, weights, ids.int(), owners, lambda *given: scaled(rank, *given))
            expected = x.float() * (weights * (ids + 1)).sum(1, keepdim=True)
            torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))


@pytest.mark.usefixtures("library")
def test_other_numbers_of_processes_are_refused() -> None:
    problem = {"num_processes": 6, "num_nodes": 1, "size": SIZE, "dtype": "bfloat16"}
    group = CommGroup(ProcessGroup("data", 0, tuple(range(6))), (0, Link()))
    with pytest.raises(ValueError, match="6 processes"):
        exchange_tokens(problem, group, options=DeepEPOptions())


@pytest.mark.usefixtures("library")
def test_engines_of_several_processes_are_refused() -> None:
    problem = {"num_processes": 4, "num_nodes": 1, "size": SIZE, "dtype": "bfloat16"}
    group = CommGroup(ProcessGroup("experts", 0, (0, 1, 2, 3)), (0, Link()), TokenCounts(2))
    with pytest.raises(ValueError, match="--tensor-parallel-size"):
        exchange_tokens(problem, group, options=DeepEPOptions())


def test_library_that_does_not_load_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep.py").write_text("raise ImportError('undefined symbol: ncclCommX')")
    monkeypatch.syspath_prepend(tmp_path)
    problem = {"num_processes": 2, "num_nodes": 1, "size": SIZE, "dtype": "bfloat16"}
    group = CommGroup(ProcessGroup("data", 0, (0, 1)), (0, Link()))
    with pytest.raises(ImportError, match="DeepEP does not load: undefined symbol: ncclCommX"):
        exchange_tokens(problem, group, options=DeepEPOptions())


def selected(*, has_library: bool, **settings: Any) -> str:
    """Return the backend of `exchange_tokens` on two GPUs."""
    catalog, config = Catalog.discover(), Config.from_keywords(**{**SETTINGS, **settings})
    chosen = Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", (9, 0)),
        read_overrides(config, catalog),
        options=config.backend_options,
        ops=installed_ops(catalog),
        module_exists=lambda name: has_library or name != "deep_ep",
    )
    problem = {"num_processes": 2, "num_nodes": 1, "size": 2048, "dtype": "bfloat16"}
    backend = chosen.select("exchange_tokens", problem).spec.backend
    chosen.check()
    return backend


def test_it_is_selected_by_name() -> None:
    assert selected(has_library=True) == "deepep"
    assert selected(has_library=True, deepep_mode="normal") == "deepep"
    with pytest.raises(SelectionError, match=r"tokenspeed-comm-deepep\[deepep\]"):
        selected(has_library=False)


def test_modes_are_refused_in_one_line() -> None:
    with pytest.raises(SelectionError, match="IBGDA") as refused:
        selected(has_library=True, deepep_mode="low_latency")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="--all2all-backend deepep"):
        Config.from_keywords(model="demo", deepep_mode="normal")


@pytest.mark.skipif(WHEELS is None, reason="`nox -s vendors` downloads the library, which is large")
def test_library_has_the_recorded_signatures() -> None:
    (wheel,) = Path(WHEELS or "").glob("tokenspeed_deepep-*.whl")
    recorded = SIGNATURES[library_of(wheel)]
    assert {name: read(wheel, name) for name in recorded} == recorded
