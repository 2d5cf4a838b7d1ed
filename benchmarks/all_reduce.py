# mypy: allow-untyped-calls
"""Time all-reduces between the GPUs of one machine, alone and with the residual addition and the RMS norm after them.

    python benchmarks/all_reduce.py [--processes 2] [--size 4096] [--kilobytes 8 16 64 256 1024 4096 16384 65536]

Each kernel runs 20 times in a CUDA graph, as in decode steps. Prints one JSON line per size with µs per call on the
slowest process: the median of 9 measurements of 10 replays. All results are first compared with sums of the gathered
inputs. In the measured graphs the sums overflow, which does not change the times. `nccl` and `symm` are the all-reduce
through NCCL and through symmetric memory, `norm` is the addition and the norm alone, and `fused` is the op
`all_reduce_add_rms_norm`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from tokenspeed_core.api import FUSED_OP, CommGroup, KernelSpec, ProcessGroup
from tokenspeed_kernels.collectives import NCCL_COMM, SYMM_COMM, TRITON_COMM
from tokenspeed_kernels.triton.norm.rms_norm import add_rms_norm

NUM_CALLS = 20  # in a graph
NUM_REPLAYS = 10  # in a measurement
NUM_MEASUREMENTS = 9
MAX_FUSED_BYTES = 80 << 20
EPS = 1e-6
TOLERANCE = 1e-2  # of a summand: each addition may round to bfloat16

Call = Callable[[], Tensor]


class Kernels:
    """The kernels of one process, for rows of `size` bfloat16 values."""

    def __init__(self, group: CommGroup, size: int) -> None:
        problem = {
            "num_processes": group.group.size,
            "num_nodes": 1,
            "size": size,
            "dtype": "bfloat16",
        }
        max_num_tokens = MAX_FUSED_BYTES // (2 * size)
        self._nccl = _of_op(NCCL_COMM, "all_reduce").factory()(problem, group)
        self._symm = SYMM_COMM.factory()(problem, group)
        fused = {**problem, "max_num_tokens": max_num_tokens}
        self._fused = _of_op(TRITON_COMM, FUSED_OP).factory()(fused, group)
        self._norm = add_rms_norm({"size": size, "dtype": "bfloat16"})
        self.max_num_fused = max_num_tokens

    def calls(self, x: Tensor, residual: Tensor, weight: Tensor) -> Iterator[tuple[str, Call]]:
        """Yield the name of each kernel, and a call that returns the sum or the norm."""
        into = residual.clone()

        def separate(reduce: Callable[[Tensor], Tensor]) -> Tensor:
            return self._norm(reduce(x), into, weight, EPS)[0]

        yield "nccl", lambda: self._nccl(x)
        yield "symm", lambda: self._symm(x)
        yield "norm", lambda: self._norm(x, into, weight, EPS)[0]
        yield "nccl and norm", lambda: separate(self._nccl)
        yield "symm and norm", lambda: separate(self._symm)
        if x.shape[0] <= self.max_num_fused:
            yield "fused", lambda: self._fused(x, into, weight, EPS)[0]

    def check(self, x: Tensor, residual: Tensor, weight: Tensor) -> None:
        """Compare all kernels with the sum of the gathered inputs. Raises AssertionError."""
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, x)
        total = torch.stack([part.float() for part in parts]).sum(0)
        added = residual.float() + total.to(x.dtype).float()
        normed = torch.rms_norm(added, added.shape[-1:], weight.float(), EPS)
        tolerance = TOLERANCE * len(parts)
        check = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
        check(self._nccl(x.clone()).float(), total)
        check(self._symm(x.clone()).float(), total)
        if x.shape[0] <= self.max_num_fused:
            found, stream = self._fused(x, residual.clone(), weight, EPS)
            check(found.float(), normed)
            check(stream.float(), added)


def _of_op(specs: Sequence[KernelSpec], op: str) -> KernelSpec:
    return next(spec for spec in specs if spec.op == op)


def time_call(call: Call) -> float:
    """Capture a call and return its µs on the slowest process."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_CALLS):
            call()
    graph.replay()
    found = []
    for _ in range(NUM_MEASUREMENTS):
        torch.cuda.synchronize()
        distributed.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # synchronizes the processes
        start.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / (NUM_REPLAYS * NUM_CALLS))
    slowest = torch.tensor([statistics.median(found)], device="cuda")
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return float(slowest)


def run(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """Measure in one process."""
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=arguments.processes,
        device_id=torch.device("cuda", rank),
    )
    members = ProcessGroup("world", rank, tuple(range(arguments.processes)))
    kernels = Kernels(CommGroup(members, distributed.group.WORLD), arguments.size)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    shared = torch.Generator(device="cuda").manual_seed(99)
    weight = torch.randn(arguments.size, generator=shared, device="cuda").bfloat16()
    for kilobytes in arguments.kilobytes:
        shape = max(1, kilobytes * 1024 // (2 * arguments.size)), arguments.size
        x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        residual = torch.randn(shape, generator=shared, device="cuda").bfloat16()
        kernels.check(x, residual, weight)
        times = {
            name: round(time_call(call), 2) for name, call in kernels.calls(x, residual, weight)
        }
        if rank == 0:
            print(
                json.dumps({"kilobytes": x.numel() * 2 / 1024, "rows": shape[0], **times}),
                flush=True,
            )
    torch.cuda.synchronize()
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Parse, and start the processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="number of GPUs")
    parser.add_argument("--size", type=int, default=4096, help="values per row")
    parser.add_argument(
        "--kilobytes",
        type=int,
        nargs="+",
        default=[8, 16, 64, 256, 1024, 4096, 16384, 65536],
        help="sizes of the input",
    )
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.processes:
        parser.error(f"needs {arguments.processes} GPUs, found {torch.cuda.device_count()}")
    print(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        spawn(run, (arguments, store), arguments.processes)


if __name__ == "__main__":
    main()
