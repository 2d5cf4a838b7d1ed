"""Times the installed attention backends beside each other, as captured steps of a model of 40,960 tokens.

    python benchmarks/attention_backends.py

Needs a CUDA device. A backend that fails the conformance kit is left out, and the reference is, which no graph can
hold. Times are those of kernels.py; which backend `auto` takes is decided by rank_attention.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import attention_cases, attention_problem
from kernels import ceilings, conforms, time_of

from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.runner.platform import describe_device

MAX_MODEL_LEN = 40960


def main() -> None:
    """Check, time, print a line for each case."""
    device = torch.device("cuda")
    specs = usable(device)
    best = ceilings(device)
    for case in attention_cases(device, max_model_len=MAX_MODEL_LEN):
        floor = max(case.num_bytes / best.bandwidth, case.num_flops / best.flops)
        times = []
        for spec in specs:
            torch.manual_seed(0)
            times.append(f"{spec.backend} {1e6 * time_of(case.bind(spec)):.1f} us")
        print(f"{case.name:27} floor {1e6 * floor:.1f} us", *times, sep="  ", flush=True)


def usable(device: torch.device) -> list[KernelSpec]:
    """Return the installed backends that run here, in graphs, and conform."""
    kernels = [k for k in installed_kernels(Catalog.discover()) if k.spec.op == "attention" and not k.spec.reference]
    selector = Selector(kernels, describe_device(device), needs=frozenset({"graph_safe"}))
    selector.select_attention(attention_problem("prefill"))
    (planned,) = selector.plan().ops
    fitting = {verdict.backend for verdict in planned.verdicts if verdict.fits}
    return [k.spec for k in kernels if k.spec.backend in fitting and conforms(k.spec, device)]


if __name__ == "__main__":
    main()
