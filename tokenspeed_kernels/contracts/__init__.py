"""Op contracts of this distribution, by family, and references of the core's ops. Imports no tensor library."""

from tokenspeed_kernels.contracts.core import CORE_REFERENCES
from tokenspeed_kernels.contracts.fp8 import FP8
from tokenspeed_kernels.contracts.fp8_block import FP8_BLOCK
from tokenspeed_kernels.contracts.linear import DENSE
from tokenspeed_kernels.contracts.moe import MOE
from tokenspeed_kernels.contracts.norm import NORM
from tokenspeed_kernels.contracts.rope import ROPE, ROPE_CACHE

__all__ = ["CORE_REFERENCES", "DENSE", "FP8", "FP8_BLOCK", "MOE", "NORM", "ROPE", "ROPE_CACHE"]
