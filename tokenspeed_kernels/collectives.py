"""Descriptors of the kernels of collectives. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import Capability, KernelSpec
from tokenspeed_kernels.contracts.comm import COMM

# Their sizes are numbers of the host, which a captured CUDA graph would keep.
_UNEVEN = ("all_gather_tokens", "reduce_scatter_tokens")


def _kernel(op: str, backend: str, platform: str) -> KernelSpec:
    """Describe a kernel of torch.distributed, which calls gloo or NCCL depending on the group."""
    return KernelSpec(
        op=op,
        backend=backend,
        capability=Capability(
            platforms=(platform,),
            dtypes=("float32", "bfloat16", "float16"),
            features=frozenset() if op in _UNEVEN else frozenset({"graph_safe"}),
        ),
        load=f"tokenspeed_kernels.reference.comm:{op}",
        reference=backend == "torch",
    )


TORCH_COMM = tuple(_kernel(contract.name, "torch", "cpu") for contract in COMM)
NCCL_COMM = tuple(_kernel(contract.name, "nccl", "cuda") for contract in COMM)
