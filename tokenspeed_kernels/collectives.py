"""Descriptors of the kernels of collectives. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import FUSED_OP, AxisLimit, Capability, KernelSpec
from tokenspeed_kernels.contracts.comm import COMM


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
NCCL_COMM = tuple(_kernel(op, "nccl", "cuda") for op in _OPS if op != FUSED_OP)
# Not graph_safe: the host needs the numbers of tokens in each layer.
ALLTOALL_COMM = KernelSpec(
    op="exchange_tokens",
    backend="alltoall",
    capability=Capability(
        platforms=("cpu", "cuda"), dtypes=("float32", "bfloat16", "float16"), features=frozenset()
    ),
    load="tokenspeed_kernels.reference.comm:exchange_tokens",
)
_OF_ONE_NODE = AxisLimit("num_processes", 2, 8)
SYMM_COMM = KernelSpec(
    op="all_reduce",
    backend="symm",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=(8, 0),
        dtypes=("float32", "bfloat16"),
        features=frozenset({"graph_safe"}),
        # Rows are multiples of four bytes.
        limits=(_OF_ONE_NODE, AxisLimit("size", 2, multiple_of=2)),
    ),
    load="tokenspeed_kernels.symmetric_memory:all_reduce",
    needs_name=True,
)
TRITON_COMM = KernelSpec(
    op=FUSED_OP,
    backend="triton",
    capability=Capability(
        platforms=("cuda",),
        min_compute_capability=(8, 0),
        dtypes=("float32", "bfloat16", "float16"),
        features=frozenset({"graph_safe", "batch_invariant"}),
        limits=(_OF_ONE_NODE, AxisLimit("size", 1, 16384)),
    ),
    load="tokenspeed_kernels.triton.comm.all_reduce_norm:all_reduce_add_rms_norm",
    requires=("triton",),
)
