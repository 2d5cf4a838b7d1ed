"""The host's summary of leading blocks, compared with whole block tables."""

from __future__ import annotations

import numpy as np
import pytest
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.api.step import LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.worker.slots import SHARED_PREFIX, SHARING_ROWS, SHORT, SlotFlags

NUM_SEQS, MAX_LEN = 12, 1024


class TableKeeper:
    """A runner that keeps the whole block table of each slot and checks the flags against it."""

    def __init__(self, block_size: int) -> None:
        self.flags = SlotFlags(NUM_SEQS, 1, block_size)
        self.flagged: list[bool] = []
        self._num_leading = -(-SHARED_PREFIX // block_size)
        self._tables: list[dict[int, int]] = [{} for _ in range(NUM_SEQS)]
        self._results: dict[int, StepResult] = {}

    def forward(self, plan: StepPlan) -> None:
        if plan.slot_inits is not None:
            self.flags.update(plan.slot_inits)
            for slot in plan.slot_inits.slots:
                self._tables[slot] = {}
        self.flags.note_blocks(plan.block_deltas)
        (delta,) = plan.block_deltas
        for slot, index, block in zip(delta.slots, delta.indices, delta.blocks, strict=True):
            self._tables[slot][int(index)] = int(block)
        decodes = plan.slots[: plan.num_decodes]
        heads = [[self._tables[slot].get(i) for i in range(self._num_leading)] for slot in decodes]
        shares = any(None not in head and heads.count(head) >= SHARING_ROWS for head in heads)
        longest = max(plan.num_computed_tokens[: plan.num_decodes], default=0)
        flag = self.flags.no_shared_prefix(plan)
        assert flag == (not shares and longest < SHORT)
        self.flagged.append(flag)
        num_tokens = plan.wants_logits.astype(np.int32)
        tokens = np.full(int(num_tokens.sum()), 7, np.int32)
        self._results[plan.step_id] = StepResult(plan.step_id, num_tokens, tokens, None)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        pass

    def collect(self, step_id: int) -> StepResult:
        return self._results.pop(step_id)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("block_size", [16, 64, 512])
def test_shared_prefix_flag_follows_the_block_tables(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    kv = KVManager((FullAttention("full", 1, 1, 1),), block_size, 400)
    limits = SchedulerLimits(NUM_SEQS, MAX_LEN, 600, 600, 1000, 1000)
    runner = TableKeeper(block_size)
    engine = Engine(Scheduler(limits, kv, POLICIES["fcfs"]), runner, bounds_decode_latency=False)
    prefixes = [rng.integers(0, 999, 600).tolist() for _ in range(2)]
    number = 0
    # Alternate between a prefix that most have and a mix of prefixes and lengths.
    for is_common in (True, False, True, False):
        for index in range(12):
            number += 1
            prefix = prefixes[index == 5 if is_common else int(rng.integers(2))]
            length = (
                560
                if is_common
                else int(rng.choice([0, 100, SHARED_PREFIX - 16, SHARED_PREFIX, 560]))
            )
            prompt = prefix[:length] + rng.integers(0, 999, int(rng.integers(1, 40))).tolist()
            engine.submit(request(number, prompt, max_tokens=int(rng.integers(2, 60))))
        while engine.has_work:
            engine.step()
    assert set(runner.flagged) == {True, False}
