"""What is decided before anything is loaded: the runner is built from it. No tensor library is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_core.api.models import Quantization
from tokenspeed_core.api.policy import Policy
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint
from tokenspeed_core.config import Config
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.scheduler.limits import SchedulerLimits


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything is settled except what only the device can answer (its memory, the block size).

    In `config` the type of weights and the longest sequence are no longer "auto". `limits` hold until a smaller pool
    lowers them. `kv_scales` are what each layer's keys and values are divided by in the cache (empty: 1).
    `num_threads` is for the CPU; None leaves torch's own choice (the physical cores, or OMP_NUM_THREADS). Where other
    processes keep cores busy, one thread fewer than cores is far better than one too many: every op ends in a barrier.
    """

    config: Config
    checkpoint: ResolvedCheckpoint
    limits: SchedulerLimits
    quantization: Quantization | None
    overrides: tuple[Override, ...]
    kv_scales: tuple[float, ...]
    policy: Policy
    num_threads: int | None

    @property
    def kv_dtype(self) -> str:
        """The element type of the KV cache, as torch names it."""
        return self.config.dtype if self.config.kv_cache_dtype == "auto" else "float8_e4m3fn"
