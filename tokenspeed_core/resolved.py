"""The decisions of a start that are made before weights are loaded. Imports no tensor library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.api.executors import ExecutorSpec
from tokenspeed_core.api.grammars import GrammarSpec
from tokenspeed_core.api.models import DraftModelInfo, KVScale
from tokenspeed_core.api.parallel import ONE_PROCESS, ParallelLayout
from tokenspeed_core.api.policy import Policy
from tokenspeed_core.checkpoint.quantization import ResolvedQuantization
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.drafting import DrafterChoice
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kv_cache.draft_groups import join_groups
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.scheduler.limits import SchedulerLimits


@dataclass(frozen=True, slots=True)
class Resolved:
    """All decisions of a start except those that depend on the device, such as memory and block size."""

    config: Config  # `dtype` and `max_model_len` are no longer "auto"
    checkpoint: ResolvedCheckpoint
    limits: SchedulerLimits  # a smaller KV cache may lower them
    quantization: ResolvedQuantization | None
    overrides: tuple[Override, ...]
    kv_scales: tuple[KVScale, ...]  # of each layer; empty: 1
    policy: Policy
    # Threads on a CPU; None leaves torch's default. Every op ends in a barrier, so one thread too many
    # costs far more than one too few when other processes keep cores busy.
    num_threads: int | None
    grammars: tuple[Entry, GrammarSpec] | None = None  # the backend of structured output
    parallel: ParallelLayout = ONE_PROCESS
    executor: tuple[Entry, ExecutorSpec] | None = None  # None: the built-in one
    drafter: DrafterChoice | None = None  # None: no speculative decoding
    replica: int = 0  # the number of this engine among those of --data-parallel-size

    @property
    def draft_model(self) -> DraftModelInfo | None:
        """The drafter's model, if it is one."""
        return None if self.drafter is None else self.drafter.model

    @property
    def num_parameters(self) -> int:
        """The weights of the model and of the draft model."""
        draft = self.draft_model
        return self.checkpoint.info.num_parameters + (draft.num_parameters if draft else 0)

    @property
    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """The cache groups of the model, with the layers of the draft model."""
        return self._joined()[0]

    @property
    def draft_groups(self) -> Mapping[str, str]:
        """The cache group that holds each group of the draft model."""
        return self._joined()[1]

    @property
    def num_draft_layers(self) -> Mapping[str, int]:
        """The number of the draft model's layers in each cache group."""
        found: Counter[str] = Counter()
        for group in () if self.draft_model is None else self.draft_model.cache_groups:
            found[self.draft_groups[group.name]] += group.num_layers
        return found

    def _joined(self) -> tuple[tuple[CacheGroupSpec, ...], Mapping[str, str]]:
        draft = () if self.draft_model is None else self.draft_model.cache_groups
        return join_groups(self.checkpoint.info.cache_groups, draft)

    @property
    def kv_dtype(self) -> str:
        """The element type of the KV cache, as torch names it."""
        return self.config.dtype if self.config.kv_cache_dtype == "auto" else "float8_e4m3fn"
