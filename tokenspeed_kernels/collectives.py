"""Descriptors of the kernels of collectives. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec
from tokenspeed_kernels.contracts.comm import COMM, FUSED_OPS


def _kernel(op: str, backend: str, platform: str) -> KernelSpec:
    """Describe a kernel of torch.distributed, which calls gloo or NCCL depending on the group."""
    return KernelSpec(
        op=op,
        backend=backend,
        capability=Capability(
            platforms=(platform,),
            dtypes=("float32", "bfloat16", "float16"),
            features=frozenset({"graph_safe"}),
        ),
        load=f"tokenspeed_kernels.reference.comm:{op}",
        reference=backend == "torch",
    )


_OPS = tuple(contract.name for contract in COMM if contract.name != "exchange_tokens")
TORCH_COMM = tuple(_kernel(op, "torch", "cpu") for op in _OPS)
NCCL_COMM = tuple(_kernel(op, "nccl", "cuda") for op in _OPS if op not in FUSED_OPS)
# Not graph_safe: the host reads the numbers of tokens in each layer.
ALLTOALL_COMM = KernelSpec(
    op="exchange_tokens",
    backend="alltoall",
    capability=Capability(
        platforms=("cpu", "cuda"), dtypes=("float32", "bfloat16", "float16"), features=frozenset()
    ),
    load="tokenspeed_kernels.reference.comm:exchange_tokens",
)
_OF_ONE_NODE = (AxisLimit("num_processes", 2, 8), AxisLimit("num_nodes", 1, 1))
SYMM_COMM = KernelSpec(
    op="all_reduce",
    backend="symm",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=(8, 0),
        dtypes=("float32", "bfloat16"),
        features=frozenset({"graph_safe"}),
        # Rows are multiples of four bytes.
        limits=(*_OF_ONE_NODE, AxisLimit("size", 2, multiple_of=2)),
    ),
    load="tokenspeed_kernels.symmetric_memory:all_reduce",
    needs_name=True,
)


def _fused(op: str, min_compute_capability: tuple[int, int], size: AxisLimit) -> KernelSpec:
    """Describe a kernel that adds up summands, adds the sum to the residual stream and normalizes it."""
    return KernelSpec(
        op=op,
        backend="triton",
        capability=Capability(
            platforms=("cuda",),
            min_compute_capability=min_compute_capability,
            dtypes=("float32", "bfloat16", "float16"),
            features=frozenset({"graph_safe", "batch_invariant"}),
            limits=(*_OF_ONE_NODE, size),
        ),
        load=f"tokenspeed_kernels.triton.comm.all_reduce_norm:{op}",
        requires=("triton",),
    )


# FP8 linear layers take multiples of 16 features. For these sizes, the codes equal those of separate kernels.
_FP8_SIZES = AxisLimit("size", 16, 16384, multiple_of=16)
TRITON_COMM = (
    _fused(FUSED_OPS[0], (8, 0), AxisLimit("size", 1, 16384)),
    *(_fused(op, (8, 9), _FP8_SIZES) for op in FUSED_OPS[1:]),
)
