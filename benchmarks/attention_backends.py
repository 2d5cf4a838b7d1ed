"""Times the installed attention backends beside each other, as captured steps of a model of 40,960 tokens.

    python benchmarks/attention_backends.py

Needs a CUDA device. A backend that fails the conformance kit is left out, and the reference is, which no graph can
hold; one that must be compiled first is checked on the timed problems alone. Times are those of kernels.py. The line
of `prepare` says what a backend costs the host once a step, for all layers. Which backend `auto` takes is decided by
rank_attention.py.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import attention_cases, attention_problem, attention_step
from kernels import ceilings, conforms, time_of

from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.attention import AttentionLimits
from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.kernels.preference import Preference
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.spec import PHASES, KernelSpec
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.runner.platform import describe_device
from tokenspeed_core.testing.attention import check_attention

MAX_MODEL_LEN = 40960


def main() -> None:
    """Check, time, print a line for each case."""
    device = torch.device("cuda")
    specs = usable(device)
    print("prepare 64 x 2048", *(f"{spec.backend} {prepare_time(spec, device):.1f} us" for spec in specs), sep="  ")
    best = ceilings(device)
    for case in attention_cases(device, max_model_len=MAX_MODEL_LEN):
        floor = max(case.num_bytes / best.bandwidth, case.num_flops / best.flops)
        times = []
        for spec in specs:
            torch.manual_seed(0)
            times.append(f"{spec.backend} {1e6 * time_of(case.bind(spec)):.1f} us")
        print(f"{case.name:27} floor {1e6 * floor:.1f} us", *times, sep="  ", flush=True)


def usable(device: torch.device) -> list[KernelSpec]:
    """Return the installed backends that run here, in graphs, and conform; of each the first spec that fits."""
    specs: dict[str, KernelSpec] = {}
    for kernel in installed_kernels(Catalog.discover()):
        spec = kernel.spec
        if spec.op != "attention" or spec.reference or spec.backend in specs:
            continue
        named = [Preference.parse("attention", (spec.backend,))]
        selector = Selector([kernel], describe_device(device), named, needs=frozenset({"graph_safe"}))
        with contextlib.suppress(SelectionError):
            specs[spec.backend] = selector.select_attention(attention_problem("decode")).spec
    return [spec for spec in specs.values() if (fits_timed if spec.needs_compile else conforms)(spec, device)]


def fits_timed(spec: KernelSpec, device: torch.device) -> bool:
    """Run the conformance kit on the problems that are timed; raises what it raises."""
    print(f"{spec.backend} conforms in {check_attention(spec, device, cases=map(attention_problem, PHASES))} runs")
    return True


def prepare_time(spec: KernelSpec, device: torch.device) -> float:
    """Return the median time in microseconds that preparing a captured step of decodes takes, the device idle."""
    step, _ = attention_step([1] * 64, [2048] * 64, device, max_model_len=MAX_MODEL_LEN)
    limits = AttentionLimits(step.num_rows, step.num_tokens, step.max_seq_len, step.block_table.shape[1])
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
