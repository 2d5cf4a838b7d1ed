"""Runs a kernel against its op's reference, over what its spec declares.

`check` is what a plugin's tests call, once per spec; each of the questions it asks is a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokenspeed_core.kernels.ops import OpContract, Problem
from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_core.testing.shapes import NUM_ROWS, contract_of, problems

Arguments = Mapping[str, Any]
_RAISED = ("bfloat16", "float16")  # to float32, for the reference; what is stored in eight bits stays so


def check(
    spec: KernelSpec,
    device: torch.device,
    *,
    contract: OpContract | None = None,
    cases: Iterable[Problem] | None = None,
    num_rows: Iterable[int] = NUM_ROWS,
) -> int:
    """Ask everything of a kernel on a device and return how many runs it took.

    Raises AssertionError naming the case. Attention has its own check, in `testing.attention`.
    """
    contract = contract_of(spec) if contract is None else contract
    runs = 0
    for problem in problems(spec, contract) if cases is None else cases:
        kernel = spec.factory()(problem)
        for rows in num_rows:
            for strided in (False, True):
                agrees_with_reference(kernel, contract, problem, rows, device, strided=strided)
                runs += 1
        if "batch_invariant" in spec.capability.features:
            ignores_other_rows(kernel, contract, problem, max(num_rows), device)
        if "graph_safe" in spec.capability.features and device.type == "cuda":
            replays(kernel, contract, problem, max(num_rows), device)
    assert runs, f"{spec.backend} declares no problem that the kit has for op {spec.op!r}"
    return runs


def make_inputs(
    contract: OpContract, problem: Problem, rows: int, device: torch.device, *, strided: bool, seed: int = 0
) -> dict[str, Any]:
    """Return fresh inputs for a problem; the same arguments give the same inputs."""
    generator = torch.Generator().manual_seed(seed * 7919 + rows)
    inputs: dict[str, Any] = load_target(contract.inputs)(problem, rows, device, generator, strided)
    return inputs


def run(kernel: Callable[..., Any], contract: OpContract, arguments: Arguments) -> list[Tensor]:
    """Call a kernel; return its results and then what it mutated."""
    result = kernel(*arguments.values())
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return [*results, *(arguments[name] for name in contract.mutates)]


def agrees_with_reference(
    kernel: Callable[..., Any], contract: OpContract, problem: Problem, rows: int, device: torch.device,
    *, strided: bool,
) -> None:
    """Compare a kernel, given poisoned memory, with the reference in float32; and its inputs with before."""
    given = make_inputs(contract, problem, rows, device, strided=strided)
    kept = make_inputs(contract, problem, rows, device, strided=strided)
    case = f"{contract.name} {dict(problem)}, {rows} rows{', strided' if strided else ''}, {device}"
    with poisoned_memory():
        found = run(kernel, contract, given)
    wide = {axis: "float32" if value in _RAISED else value for axis, value in problem.items()}
    raised = {name: _wide(value) if _is_raised(value) else value for name, value in kept.items()}
    expected = run(load_target(contract.reference)(wide), contract, raised)
    for name, value in kept.items():
        if isinstance(value, Tensor) and name not in contract.mutates:
            assert torch.equal(given[name], value), f"{case}: it wrote into {name}"
    assert len(found) == len(expected), f"{case}: {len(found)} results instead of {len(expected)}"
    tolerance = contract.tolerance(problem["dtype"])
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.shape == want.shape, f"{case}: result {index} is {tuple(got.shape)}, not {tuple(want.shape)}"
        torch.testing.assert_close(
            _wide(got), _wide(want), rtol=tolerance.relative, atol=tolerance.absolute,
            msg=labelled(f"{case}: result {index}"),
        )


def ignores_other_rows(
    kernel: Callable[..., Any], contract: OpContract, problem: Problem, rows: int, device: torch.device
) -> None:
    """Compare the bits of rows computed together with those of the last row alone."""
    together = make_inputs(contract, problem, rows, device, strided=False)
    single = make_inputs(contract, problem, rows, device, strided=False)
    alone = {name: v[-1:] if name in contract.rows else v for name, v in single.items()}
    shared = [name for name in contract.mutates if name not in contract.rows]
    for got, want in zip(run(kernel, contract, alone), run(kernel, contract, together), strict=True):
        if not shared:
            same = torch.equal(_wide(got), _wide(want[-1:]))
            assert same, f"{contract.name} {dict(problem)}: a row depends on the others"


def repeats(
    kernel: Callable[..., Any], contract: OpContract, problem: Problem, rows: int, device: torch.device
) -> None:
    """Compare the bits of two calls with equal inputs."""
    first, second = (
        run(kernel, contract, make_inputs(contract, problem, rows, device, strided=False)) for _ in range(2)
    )
    for got, want in zip(first, second, strict=True):
        same = torch.equal(_wide(got), _wide(want))
        assert same, f"{contract.name} {dict(problem)}: the same call gave other bits the second time"


def replays(
    kernel: Callable[..., Any], contract: OpContract, problem: Problem, rows: int, device: torch.device
) -> None:
    """Capture a call in a CUDA graph, replay it on other inputs, and compare bits with a plain call."""
    first, second, plain = (
        make_inputs(contract, problem, rows, device, strided=False, seed=seed) for seed in (0, 1, 1)
    )
    run(kernel, contract, make_inputs(contract, problem, rows, device, strided=False))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(kernel, contract, first)
    for name, value in second.items():
        if isinstance(value, Tensor):
            first[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize(device)
    for got, want in zip(found, run(kernel, contract, plain), strict=True):
        same = torch.equal(_wide(got), _wide(want))
        assert same, f"{contract.name} {dict(problem)}: a replayed graph gives other results"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill what it allocates uninitialised with NaN (integers: their largest), its default here."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def labelled(case: str) -> Callable[[str], str]:
    """Return what puts a case before torch's account of a difference."""
    return lambda text: f"{case}: {text}"


def _is_raised(value: Any) -> bool:
    return isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") in _RAISED


def _wide(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.is_floating_point() else value
