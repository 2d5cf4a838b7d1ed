"""Compare the installed attention backends, in captured steps of a model with a context of 40,960 tokens.

    python benchmarks/attention_backends.py [--backends NAME ...] [--quick]

Needs a CUDA device. Leaves out backends that fail the conformance kit, and the reference, which cannot run in CUDA
graphs. Backends that need compilation are checked only on the timed problems. `--quick` skips the kit and times a few
cases. A backend whose result differs from the first one's gets no time. Times are measured as in kernels.py. `prepare`
lines show the host time per step, for all layers together. The ranking for `auto` comes from rank_attention.py.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import (
    Case,
    attention_cases,
    attention_problem,
    attention_step,
    few_attention_cases,
)
from kernels import MAX_RELATIVE_ERROR, ceilings, conforms, time_of
from tokenspeed_testing.attention import check_attention

from tokenspeed_core.api.attention import AttentionLimits
from tokenspeed_core.api.kernels import PHASES, KernelSpec
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.platform import describe_device

MAX_MODEL_LEN = 40960


def main() -> None:
    """Check, time, and print a line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME",
        help="backends to time, in this order (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="time a few cases without the conformance kit"
    )
    given = parser.parse_args()
    device = torch.device("cuda")
    specs = usable(device, given.backends)
    if not given.quick:
        specs = [
            spec for spec in specs if (fits_timed if spec.needs_compile else conforms)(spec, device)
        ]
    for num_rows, length in ((64, 2048), (256, 640)):
        costs = (
            f"{spec.backend} {prepare_time(spec, device, num_rows, length):.1f} us"
            for spec in specs
        )
        print(f"prepare {num_rows} x {length}", *costs, sep="  ", flush=True)
    best = ceilings(device)
    for case in (few_attention_cases if given.quick else attention_cases)(
        device, max_model_len=MAX_MODEL_LEN
    ):
        floor = max(case.num_bytes / best.bandwidth, case.num_flops / best.flops)
        print(
            f"{case.name:29} floor {1e6 * floor:.1f} us",
            *times_of(case, specs),
            sep="  ",
            flush=True,
        )


def times_of(case: Case, specs: list[KernelSpec]) -> Iterator[str]:
    """Yield the time of a case with each backend, or its difference from the first backend's result."""
    expected: Tensor | None = None
    for spec in specs:
        torch.manual_seed(0)
        call = case.bind(spec)
        found = call().float()
        expected = found if expected is None else expected
        error = float((found - expected).norm() / expected.norm())
        if error <= MAX_RELATIVE_ERROR:
            yield f"{spec.backend} {1e6 * time_of(call):.1f} us"
        else:  # also NaN
            yield f"{spec.backend} differs by {error:.1e}"


def usable(device: torch.device, names: list[str] | None) -> list[KernelSpec]:
    """Return the named backends (None: all installed) that run here in CUDA graphs, with one descriptor each.

    Raises SystemExit if a named backend does not run here.
    """
    specs: dict[str, KernelSpec] = {}
    for kernel in installed_kernels(Catalog.discover()):
        spec = kernel.spec
        if spec.op != "attention" or spec.reference or spec.backend in specs:
            continue
        named = [Override.parse("attention", (spec.backend,))]
        selector = Selector(
            [kernel], describe_device(device), named, needs=frozenset({"graph_safe"})
        )
        with contextlib.suppress(SelectionError):
            specs[spec.backend] = selector.select_attention(attention_problem("decode")).spec
    missing = set(names or ()) - set(specs)
    if missing:
        absent, present = ", ".join(sorted(missing)), ", ".join(specs)
        raise SystemExit(f"--backends: {absent} cannot run here. Available: {present}")
    return [specs[name] for name in (specs if names is None else names)]


def fits_timed(spec: KernelSpec, device: torch.device) -> bool:
    """Run the conformance kit on the timed problems."""
    print(
        f"{spec.backend} conforms in {check_attention(spec, device, cases=map(attention_problem, PHASES))} runs"
    )
    return True


def prepare_time(spec: KernelSpec, device: torch.device, num_rows: int, length: int) -> float:
    """Return the median time in microseconds of preparing a captured decode step, with an idle device."""
    step, _ = attention_step(
        [1] * num_rows, [length] * num_rows, device, max_model_len=MAX_MODEL_LEN
    )
    limits = AttentionLimits(
        step.num_rows, step.num_tokens, step.max_seq_len, step.block_table.shape[1]
    )
    kernel = spec.factory()(attention_problem("decode"), limits, device)
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kernel.prepare(step)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
