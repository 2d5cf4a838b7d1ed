"""Conformance of a collective's kernel, as a class to inherit: set `spec = MINE`.

Two processes run it, on a CPU or on two GPUs. Each makes the inputs of both, and so knows the result.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.ops import OpContract, Tolerance
from tokenspeed_core.api.parallel import CommGroup, ProcessGroup, TokenCounts
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.kernels.select import has_module
from tokenspeed_core.targets import load_target
from tokenspeed_testing.cases import NotRun
from tokenspeed_testing.installed import installed_catalog

_NUM_PROCESSES = 2
_ROWS = (1, 7, 300)
_SIZE = 256
_MAX_NUM_TOKENS = 6144  # of fused ops
_TIMEOUT = 120.0  # seconds


class CommConformance:
    """Checks of a kernel of the family "comm"."""

    spec: ClassVar[KernelSpec]

    def test_two_processes_compute_the_contract(self) -> None:
        """One and many rows, strided inputs, each declared dtype."""
        platform = self.spec.capability.platforms[0]
        missing = [module for module in self.spec.requires if not has_module(module)]
        if missing:
            raise NotRun(len(_ROWS), f"the modules {', '.join(missing)}")
        if platform == "cuda" and torch.cuda.device_count() < _NUM_PROCESSES:
            raise NotRun(len(_ROWS), f"{_NUM_PROCESSES} GPUs")
        ops = installed_ops(installed_catalog())
        contract = ops[self.spec.op]
        quantize = ops[contract.parts[-1]].reference if contract.parts else ""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "tokenspeed_testing.comm"])
        reports: Any = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = self.spec, contract, quantize, platform, str(Path(folder) / "store")
            processes = [
                context.Process(target=_report, args=(reports, rank, *arguments))
                for rank in range(_NUM_PROCESSES)
            ]
            for process in processes:
                process.start()
            try:
                errors = [reports.get(timeout=_TIMEOUT) for _ in processes]
            except Empty as error:
                raise AssertionError("a process gave no result") from error
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        assert not any(errors), next(filter(None, errors))


def _report(reports: Any, rank: int, *arguments: Any) -> None:
    """Put the error of a process, or "", into a queue."""
    try:
        _check(rank, *arguments)
        reports.put("")
    except Exception as error:
        reports.put(f"process {rank}: {type(error).__name__}: {error}")


def _check(
    rank: int,
    spec: KernelSpec,
    contract: OpContract,
    quantize: str,
    platform: str,
    store: str,
) -> None:
    """Check a kernel in one of two processes. `quantize` is the reference of the op's last part, if it has parts."""
    device = torch.device(platform, rank) if platform == "cuda" else torch.device(platform)
    if platform == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "nccl" if platform == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=_NUM_PROCESSES,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    members = ProcessGroup("world", rank, tuple(range(_NUM_PROCESSES)))
    tokens = TokenCounts(_NUM_PROCESSES)
    group = CommGroup(members, distributed.group.WORLD, tokens)
    is_gather = contract.name == "all_gather"
    for dtype in spec.capability.dtypes:
        size = _SIZE * _NUM_PROCESSES if is_gather else _SIZE
        problem = {
            "num_processes": _NUM_PROCESSES,
            "num_nodes": 1,
            "size": size,
            "dtype": dtype,
        }
        if "max_num_tokens" in contract.axes:
            problem["max_num_tokens"] = _MAX_NUM_TOKENS
        kernel = spec.factory()(problem, group)
        if getattr(kernel, "overlap", None) is not None:
            _check_overlap(kernel, rank, dtype, device)
        tolerance = contract.tolerance(dtype)
        for num_rows in _ROWS:
            if contract.name == "exchange_tokens":
                arguments, expected = _routed(num_rows, rank, dtype, device)
                _check_close(kernel(*arguments), expected, tolerance)
                continue
            if "max_num_tokens" in contract.axes:
                part = load_target(quantize)(problem) if quantize else None
                _check_norm(kernel, part, num_rows, rank, dtype, device, tolerance)
                continue
            if contract.name in _OF_TOKENS:
                for num_others in (num_rows, 2 * num_rows + 1):
                    counts = (num_rows, num_others)
                    tokens.begin(None if num_others == num_rows else counts)
                    inputs, expected = _of_tokens(contract.name, counts, rank, dtype, device)
                    _check_close(kernel(inputs[rank]), expected, tolerance)
                continue
            inputs = [_input(num_rows, each, dtype, device) for each in range(_NUM_PROCESSES)]
            expected = _EXPECTED[contract.name](inputs)
            _check_close(kernel(inputs[rank]), expected, tolerance)
    distributed.destroy_process_group()


def _check_norm(
    kernel: Any,
    quantize: Any,
    num_rows: int,
    rank: int,
    dtype: str,
    device: torch.device,
    tolerance: Tolerance,
) -> None:
    """Check repeated calls of an op with a norm. Their inputs differ, to detect a call that reads those of another.

    With `quantize`, a reference kernel, the checked kernel returns the values and scales of the norm.
    """
    weight = _input(1, _NUM_PROCESSES, dtype, device)[0].contiguous()
    for call in range(3):
        inputs = [_input(num_rows, each + 10 * call, dtype, device) for each in range(2)]
        residual = _input(num_rows, 99, dtype, device).clone()
        total = residual + _sum(inputs).to(residual.dtype)
        norm = torch.rms_norm(total.float(), total.shape[-1:], None, 1e-6) * weight.float()
        rounded = norm.to(total.dtype)
        expected = (rounded,) if quantize is None else quantize(rounded)
        *found, sums = kernel(inputs[rank], residual, weight, 1e-6)
        assert sums is residual
        for value, wanted in zip((*found, sums), (*expected, total), strict=True):
            assert value.dtype == wanted.dtype
            _check_close(value, wanted.float(), tolerance)
        for value in found:
            # gloo does not send FP8.
            mine = value.view(torch.uint8) if value.element_size() == 1 else value
            parts = [torch.empty_like(mine) for _ in range(_NUM_PROCESSES)]
            distributed.all_gather(parts, mine)
            assert torch.equal(parts[0], parts[1]), "processes got different bits"


def _check_overlap(kernel: Any, rank: int, dtype: str, device: torch.device) -> None:
    """Compare parts that are sent while others are computed with the kernel: in repeated calls, and captured ones."""
    weight = _input(1, _NUM_PROCESSES, dtype, device)[0].contiguous()
    overlap, num_rows = kernel.overlap, _MAX_NUM_TOKENS - 3
    x, given = (_input(num_rows, each, dtype, device).contiguous() for each in (rank, 99))

    def run(x: Tensor, residual: Tensor) -> Any:
        for _ in range(3):
            *found, residual = overlap.receive(overlap.send(torch.neg, x), residual, weight, 1e-6)
        return (*found, residual)

    def check(found: Any, x: Tensor) -> None:
        residual = given.clone()
        for _ in range(3):
            *values, residual = kernel(torch.neg(x), residual, weight, 1e-6)
        for value, wanted in zip(found, (*values, residual), strict=True):
            assert torch.equal(value, wanted), "rows that are sent in parts have different bits"

    check(run(x, given.clone()), x)
    stream, residual = given.clone(), given.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run(x, stream)
    for _ in range(3):
        stream.copy_(residual)
        graph.replay()
        check(found, x)
        x.add_(1)


def _check_close(found: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    # `torch.testing.assert_close` would import torch.distributed.tensor, a second in each process.
    found = found.float()
    assert found.shape == expected.shape, f"{found.shape} instead of {expected.shape}"
    is_close = found.isclose(expected, rtol=tolerance.relative, atol=tolerance.absolute)
    num_wrong, error = int((~is_close).sum()), float((found - expected).abs().max())
    assert not num_wrong, (
        f"{num_wrong} of {found.numel()} values are not close: off by up to {error}"
    )


def _input(num_rows: int, rank: int, dtype: str, device: torch.device) -> Tensor:
    """Return the rows of a process, strided on the first axis."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(num_rows, 2 * _SIZE, generator=generator)
    return wide.to(device, getattr(torch, dtype))[:, :_SIZE]


def _of_tokens(
    op: str, counts: tuple[int, ...], rank: int, dtype: str, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of all processes for an op of tokens, and this process's result."""
    if op == "all_gather_tokens":
        inputs = [_input(count, each, dtype, device) for each, count in enumerate(counts)]
        return inputs, torch.cat([each.float() for each in inputs])
    inputs = [_input(sum(counts), each, dtype, device) for each in range(_NUM_PROCESSES)]
    return inputs, torch.split(_sum(inputs), list(counts))[rank]


def _routed(
    num_rows: int, rank: int, dtype: str, device: torch.device
) -> tuple[tuple[Any, ...], Tensor]:
    """Return the arguments of `exchange_tokens` for this process, and its result.

    Expert e multiplies its input by e + 1. The second process owns the even ones, and the first process has no token
    for them if there is one row.
    """
    num_experts, top_k = 6, 2
    generator = torch.Generator().manual_seed(rank)
    x = _input(num_rows, rank, dtype, device)
    weights = torch.rand(num_rows, top_k, generator=generator).to(device)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :top_k]
    if num_rows == 1 and rank == 0:
        ids = torch.tensor([[1, 3]])
    ids = ids.to(device, torch.int32)
    owners = torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.int32, device=device)

    def compute(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        own = (owners[ids.long()] == rank) * weights * (ids + 1)
        return (x.float() * own.sum(1, keepdim=True)).to(x.dtype)

    expected = x.float() * (weights * (ids + 1)).sum(1, keepdim=True)
    return (x, weights, ids, owners, compute), expected


def _sum(inputs: list[Tensor]) -> Tensor:
    return torch.stack([each.float() for each in inputs]).sum(0)


def _joined(inputs: list[Tensor]) -> Tensor:
    return torch.cat([each.float() for each in inputs], dim=1)


_OF_TOKENS = ("all_gather_tokens", "reduce_scatter_tokens")
_EXPECTED: Mapping[str, Any] = {"all_reduce": _sum, "all_gather": _joined}
