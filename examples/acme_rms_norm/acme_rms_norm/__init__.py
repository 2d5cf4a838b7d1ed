"""The descriptor of the kernel. This module imports no tensor library."""

from tokenspeed_core.api import Capability, KernelSpec

RMS_NORM = KernelSpec(
    op="rms_norm",
    backend="acme/torch",
    capability=Capability(
        platforms=("cpu", "cuda"),
        dtypes=("float32", "bfloat16", "float16"),
        features=frozenset({"graph_safe"}),
    ),
    load="acme_rms_norm.kernel:rms_norm",
)
