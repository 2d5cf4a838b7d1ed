"""Comparison of a kernel with its op's reference, over the problems that its spec declares.

Plugins call `check` once per spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.ops import OpContract, Problem, prepare_weights
from tokenspeed_core.targets import load_target
from tokenspeed_testing.canaries import is_shared, with_canaries
from tokenspeed_testing.host_syncs import without_host_syncs
from tokenspeed_testing.shapes import NUM_ROWS, contract_of, problems

_NUM_CALLS = 5  # compared for bitwise equality, if the kernel claims it
Arguments = Mapping[str, Any]
# Dtypes that are converted to float32 for the reference. Quantized tensors keep their dtype.
_RAISED = ("bfloat16", "float16")


def check(
    spec: KernelSpec,
    device: torch.device,
    *,
    contract: OpContract | None = None,
    cases: Iterable[Problem] | None = None,
    num_rows: Iterable[int] = NUM_ROWS,
) -> int:
    """Run all comparisons of a kernel on a device and return their number.

    Raises AssertionError naming the case. Attention has its own `check_attention`.
    """
    contract = contract_of(spec) if contract is None else contract
    runs = 0
    for problem in problems(spec, contract) if cases is None else cases:
        kernel = spec.factory()(problem)
        for rows in num_rows:
            for strided in (False, True):
                agrees_with_reference(kernel, contract, problem, rows, device, strided=strided)
                runs += 1
        keeps_no_state(kernel, contract, problem, max(num_rows), device)
        prepares_each_expert_alone(kernel, contract, problem, device)
        if "batch_invariant" in spec.capability.features:
            ignores_other_rows(kernel, contract, problem, max(num_rows), device)
        if "graph_safe" in spec.capability.features and device.type == "cuda":
            replays(kernel, contract, problem, max(num_rows), device)
    assert runs, f"{spec.backend} declares no problem that the kit has for op {spec.op!r}"
    return runs


def make_inputs(
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
    *,
    strided: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Return inputs for a problem; the same arguments give the same inputs."""
    generator = torch.Generator().manual_seed(seed * 7919 + rows)
    inputs: dict[str, Any] = load_target(contract.inputs)(problem, rows, device, generator, strided)
    return inputs


def run(kernel: Callable[..., Any], contract: OpContract, arguments: Arguments) -> list[Tensor]:
    """Call a kernel with prepared weights; return its results, then the arguments that it mutates."""
    result = kernel(*prepared(kernel, contract, arguments).values())
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    return [*results, *(arguments[name] for name in contract.mutates)]


def prepared(kernel: Callable[..., Any], contract: OpContract, arguments: Arguments) -> Arguments:
    """Return the arguments with weights in the layout of a kernel. Copies the weights if it has its own layout."""
    if not hasattr(kernel, "prepare_weights"):
        return arguments
    weights = {name: arguments[name].clone() for name in contract.weights}
    prepare_weights(kernel, *weights.values())
    return {**arguments, **weights}


def agrees_with_reference(
    kernel: Callable[..., Any],
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
    *,
    strided: bool,
) -> None:
    """Compare a kernel with the reference in float32, with poisoned memory around its arguments.

    Results must not share memory with inputs, unless the op mutates them.
    """
    given, canaries = with_canaries(make_inputs(contract, problem, rows, device, strided=strided))
    case = f"{contract.name} {dict(problem)}, {rows} rows{', strided' if strided else ''}, {device}"
    with poisoned_memory():
        found = run(kernel, contract, given)
    for canary in canaries:
        canary.check(case, contract.mutates)
    for index, name in product(range(len(found) - len(contract.mutates)), given):
        same = name not in contract.mutates and is_shared(found[index], given[name])
        assert not same, f"{case}: result {index} is in the memory of {name}"
    expected = reference(
        contract, problem, make_inputs(contract, problem, rows, device, strided=strided)
    )
    _agree(case, contract, problem, found, expected)


def reference(contract: OpContract, problem: Problem, arguments: Arguments) -> list[Tensor]:
    """Return the results of the op's reference in float32, as `run` does."""
    wide = {axis: "float32" if value in _RAISED else value for axis, value in problem.items()}
    raised = {
        name: _as_float32(value) if _is_raised(value) else value
        for name, value in arguments.items()
    }
    return run(load_target(contract.reference)(wide), contract, raised)


def is_defined(contract: OpContract, problem: Problem, rows: int, device: torch.device) -> bool:
    """Return whether the op defines a problem: its input generator and reference raise no ValueError."""
    try:
        reference(contract, problem, make_inputs(contract, problem, rows, device, strided=False))
    except ValueError:
        return False
    return True


def keeps_no_state(
    kernel: Callable[..., Any],
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
) -> None:
    """Call a kernel twice with the same memory and different values.

    The second call must agree with the reference and must not change the first result.
    """
    given, other, plain = (
        make_inputs(contract, problem, rows, device, strided=False, seed=seed) for seed in (0, 1, 1)
    )
    case = f"{contract.name} {dict(problem)}, {rows} rows, {device}"
    first = run(kernel, contract, given)
    mutated = [given[name] for name in contract.mutates]
    kept = [
        (each, each.clone())
        for each in first
        if not any(is_shared(each, other) for other in mutated)
    ]
    for name, value in other.items():
        if isinstance(value, Tensor):
            given[name].copy_(value)
    second = run(kernel, contract, given)
    for each, before in kept:
        same = torch.equal(_as_float32(each), _as_float32(before))
        assert same, f"{case}: a second call changed the first result"
    _agree(
        f"{case}, called again with other values",
        contract,
        problem,
        second,
        reference(contract, problem, plain),
    )


def prepares_each_expert_alone(
    kernel: Callable[..., Any], contract: OpContract, problem: Problem, device: torch.device
) -> None:
    """Check that prepared experts can move: weights in another order, once prepared, are the prepared ones in that order."""
    if not hasattr(kernel, "prepare_weights"):
        return
    given = make_inputs(contract, problem, 1, device, strided=False)
    weights = {name: given[name] for name in contract.weights}
    moved = {name: weight.roll(1, dims=0) for name, weight in weights.items()}
    expected, found = (prepared(kernel, contract, each) for each in (weights, moved))
    for name in contract.weights:
        same = torch.equal(_as_float32(found[name]), _as_float32(expected[name].roll(1, dims=0)))
        assert same, (
            f"{contract.name} {dict(problem)}: prepared {name} of an expert depend on others"
        )


def ignores_other_rows(
    kernel: Callable[..., Any],
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
) -> None:
    """Check that some rows have the same bits when computed alone."""
    if any(name not in contract.rows for name in contract.mutates):
        return  # the op writes memory that all rows share, which has no rows to compare
    together = run(kernel, contract, make_inputs(contract, problem, rows, device, strided=False))
    for part in (slice(0, 1), slice(rows // 3, rows // 3 + 3), slice(rows - 1, rows)):
        inputs = make_inputs(contract, problem, rows, device, strided=False)
        alone = {
            name: value[part] if name in contract.rows else value for name, value in inputs.items()
        }
        for got, want in zip(run(kernel, contract, alone), together, strict=True):
            same = torch.equal(_as_float32(got), _as_float32(want[part]))
            assert same, f"{contract.name} {dict(problem)}: a row depends on the others, of {rows}"


def repeats(
    kernel: Callable[..., Any],
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
) -> None:
    """Check that repeated calls give the same bits."""
    first, *others = (
        run(kernel, contract, make_inputs(contract, problem, rows, device, strided=False))
        for _ in range(_NUM_CALLS)
    )
    for got, want in (
        (got, want) for other in others for got, want in zip(other, first, strict=True)
    ):
        same = torch.equal(_as_float32(got), _as_float32(want))
        assert same, f"{contract.name} {dict(problem)}: repeated calls gave different bits"


def never_synchronizes(
    kernel: Callable[..., Any],
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
) -> None:
    """Check on the CPU that a call does nothing that would synchronize with a device."""
    given = make_inputs(contract, problem, rows, device, strided=False)
    with without_host_syncs(f"{contract.name} {dict(problem)}"):
        run(kernel, contract, given)


def replays(
    kernel: Callable[..., Any],
    contract: OpContract,
    problem: Problem,
    rows: int,
    device: torch.device,
) -> None:
    """Capture a call in a CUDA graph, replay it with other inputs, and compare bits with a plain call.

    The captured call is the first one with its number of rows.
    """
    first, second, plain = (
        make_inputs(contract, problem, rows, device, strided=False, seed=seed) for seed in (0, 1, 1)
    )
    run(kernel, contract, make_inputs(contract, problem, rows + 1, device, strided=False))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(kernel, contract, first)
    for name, value in second.items():
        if isinstance(value, Tensor):
            first[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize(device)
    for got, want in zip(found, run(kernel, contract, plain), strict=True):
        same = torch.equal(_as_float32(got), _as_float32(want))
        assert same, f"{contract.name} {dict(problem)}: a replayed graph gives other results"


def _agree(
    case: str,
    contract: OpContract,
    problem: Problem,
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> None:
    assert len(found) == len(expected), f"{case}: {len(found)} results instead of {len(expected)}"
    tolerance = contract.tolerance(problem["dtype"])
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.shape == want.shape, (
            f"{case}: result {index} is {tuple(got.shape)}, not {tuple(want.shape)}"
        )
        torch.testing.assert_close(
            _as_float32(got),
            _as_float32(want),
            rtol=tolerance.relative,
            atol=tolerance.absolute,
            msg=labeled(f"{case}: result {index}"),
        )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch fill uninitialized allocations with NaN or the largest integer."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def labeled(case: str) -> Callable[[str], str]:
    """Return a function that puts the case before torch's message."""
    return lambda text: f"{case}: {text}"


def _is_raised(value: Any) -> bool:
    return isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") in _RAISED


def _as_float32(value: Any) -> Any:
    return (
        value.to(torch.float32)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )
