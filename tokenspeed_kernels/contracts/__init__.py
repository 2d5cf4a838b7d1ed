"""Op contracts of this distribution, by family, and references of the core's ops. Imports no tensor library."""

from tokenspeed_kernels.contracts.biased_experts import BIASED_EXPERTS
from tokenspeed_kernels.contracts.comm import COMM
from tokenspeed_kernels.contracts.core import CORE_REFERENCES
from tokenspeed_kernels.contracts.fp8 import FP8
from tokenspeed_kernels.contracts.fp8_block import FP8_BLOCK
from tokenspeed_kernels.contracts.integer import FP8_STATIC, INT8, W4A16
from tokenspeed_kernels.contracts.linear import DENSE
from tokenspeed_kernels.contracts.mla import MLA
from tokenspeed_kernels.contracts.moe import MOE
from tokenspeed_kernels.contracts.norm import NORM
from tokenspeed_kernels.contracts.rope import ROPE, ROPE_CACHE

__all__ = [
    "BIASED_EXPERTS",
    "COMM",
    "CORE_REFERENCES",
    "DENSE",
    "FP8",
    "FP8_BLOCK",
    "FP8_STATIC",
    "INT8",
    "MLA",
    "MOE",
    "NORM",
    "ROPE",
    "ROPE_CACHE",
    "W4A16",
]
