"""Compare every Triton kernel with the torch reference and with the limits of the device.

    python benchmarks/kernels.py [--only OP] [--json FILE] [--skip-checks]

Needs a CUDA device. A kernel that fails the conformance kit, or differs from the reference in the case itself, gets no
time. Times are medians over runs of a CUDA graph with a flushed L2 cache. The floor is the larger of bytes over the
measured copy bandwidth and operations over the measured rate of a large GEMM.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import Case, cases
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.conformance import check

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_kernels import contracts, descriptors

# Fraction of ids that may differ: sums in float32 and float64 differ at rounding ties.
MAX_ERROR = {"sample": 0.1}
MAX_RELATIVE_ERROR = 2e-2  # in the Euclidean norm, for bfloat16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of the device: bytes per second (read plus written) and operations per second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the report; times in microseconds, rates in TB/s and TFLOP/s."""

    op: str
    case: str
    microseconds: float
    reference_microseconds: float
    floor_microseconds: float
    terabytes: float
    teraflops: float
    error: float


def main() -> int:
    """Check, time and report. Return 1 if any kernel is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="time only this op")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--skip-checks", action="store_true", help="skip the conformance kit")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    specs = {
        backend: {
            spec.op: spec
            for name, group in vars(descriptors).items()
            if name.startswith(backend.upper() + "_")
            for spec in group
        }
        for backend in ("torch", "triton")
    }
    wanted = {arguments.only} if arguments.only else set(specs["triton"])
    # These references are not backends: without a fused kernel, the parts run.
    for contract in contracts.ROPE_CACHE:
        specs["torch"][contract.name] = replace(
            specs["triton"][contract.name], load=contract.reference
        )
    wrong = (
        set()
        if arguments.skip_checks
        else {op for op in wanted if not conforms(specs["triton"][op], device)}
    )
    best = ceilings(device)
    print(f"copy {best.bandwidth / 1e12:.2f} TB/s, GEMM {best.flops / 1e12:.0f} TFLOP/s")
    rows = []
    for case in cases(device):
        if case.op in wanted - wrong:
            row = _measure(case, specs["triton"][case.op], specs["torch"][case.op], best)
            if row.error > MAX_ERROR.get(case.op, MAX_RELATIVE_ERROR):
                print(f"{case.op} {case.name}: error {row.error:.1e}", flush=True)
                wrong.add(case.op)
                continue
            rows.append(row)
            print(_line(row), flush=True)
    if arguments.json:
        about = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "ceilings": asdict(best),
        }
        arguments.json.write_text(
            json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1)
        )
    for op in sorted(wrong):
        print(f"FAILED {op}: not timed")
    return 1 if wrong else 0


def conforms(spec: KernelSpec, device: torch.device) -> bool:
    """Run the conformance kit on a kernel, print the result, and return whether it passed."""
    try:
        runs = check_attention(spec, device) if spec.op == "attention" else check(spec, device)
    except Exception as error:  # report every wrong kernel
        print(f"{spec.op}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        return False
    print(f"{spec.op}: conforms in {runs} runs", flush=True)
    return True


def _measure(case: Case, spec: KernelSpec, reference: KernelSpec, ceilings: Ceilings) -> Measured:
    torch.manual_seed(0)
    call = case.bind(spec)
    torch.manual_seed(0)
    plain = case.bind(reference)
    error = _difference(case.op, call().clone(), plain().clone())
    seconds = time_of(call)
    floor = max(case.num_bytes / ceilings.bandwidth, case.num_flops / ceilings.flops)
    return Measured(
        case.op,
        case.name,
        seconds * 1e6,
        time_of(plain, graph=False) * 1e6,
        floor * 1e6,
        case.num_bytes / seconds / 1e12,
        case.num_flops / seconds / 1e12,
        error,
    )


def _difference(op: str, found: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Euclidean norm, or the fraction of ids that differ."""
    if found.dtype == torch.int64:
        return float((found != expected).double().mean())
    if (
        op == "add_rms_norm" or "rope" in op
    ):  # in place: the second call saw the output of the first
        return float("nan")
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def time_of(call: Callable[[], object], *, graph: bool = True, runs: int = 30) -> float:
    """Return the median time of a call in seconds, with the L2 cache flushed before each."""
    for _ in range(3):
        call()
    replay = call
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        replay = captured.replay
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for _ in range(runs):
        flush.zero_()
        start, end = (
            torch.Event("cuda", enable_timing=True),
            torch.Event("cuda", enable_timing=True),
        )
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def ceilings(device: torch.device) -> Ceilings:
    """Measure the limits of the device."""
    source = torch.randn(1 << 30, device=device)
    target = torch.empty_like(source)
    copy = time_of(lambda: target.copy_(source), graph=False, runs=10)
    a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device=device) for _ in range(2))
    product = time_of(lambda: a @ b, runs=10)
    return Ceilings(2 * source.nbytes / copy, 2 * 8192**3 / product)


def _line(row: Measured) -> str:
    return (
        f"{row.op:13} {row.case:27} {row.microseconds:9.1f} us  floor {row.floor_microseconds:8.1f}  "
        f"torch {row.reference_microseconds:9.1f}  {row.terabytes:5.2f} TB/s {row.teraflops:6.1f} TFLOP/s  "
        f"error {row.error:.1e}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
