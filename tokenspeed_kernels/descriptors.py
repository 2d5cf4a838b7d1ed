"""What this distribution's kernels can do; imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import Capability, KernelSpec

_ANY_FLOAT = ("float32", "bfloat16", "float16")
_BASICS = frozenset({"graph_safe"})


def _torch(op: str, load: str, features: frozenset[str] = _BASICS) -> KernelSpec:
    return KernelSpec(
        op=op,
        backend="torch",
        capability=Capability(
            platforms=("cpu", "cuda"), dtypes=_ANY_FLOAT, kv_dtypes=_ANY_FLOAT, features=features
        ),
        load=f"tokenspeed_kernels.reference.{load}",
        reference=True,
    )


TORCH_NORM = (
    _torch("rms_norm", "norm:rms_norm"),
    _torch("add_rms_norm", "norm:add_rms_norm"),
)
TORCH_ROPE = (
    _torch("rope", "rope:rope"),
    _torch("qk_norm_rope", "rope:qk_norm_rope"),
)
TORCH_ACTIVATION = (_torch("silu_mul", "activation:silu_mul"),)
TORCH_LINEAR = (_torch("linear", "linear:linear"),)
TORCH_MOE = (
    _torch("moe_route", "moe:moe_route"),
    _torch("moe_experts", "moe:moe_experts", frozenset()),
)
TORCH_CACHE = (_torch("write_kv", "cache:write_kv", frozenset()),)
TORCH_ATTENTION = (_torch("attention", "attention:attention", frozenset({"window"})),)
TORCH_SAMPLING = (
    _torch("greedy", "sampling:greedy"),
    _torch("sample", "sampling:sample"),
)
