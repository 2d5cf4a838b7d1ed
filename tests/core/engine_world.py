"""An engine on the fake model and the output of its sequences, shared by tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from tokenspeed_testing.drafts import FixedDepth
from tokenspeed_testing.fake_model import FakeModel, FakeRunner

from tokenspeed_core.api.cache_groups import CacheGroupSpec, FullAttention, SlidingWindow
from tokenspeed_core.api.drafters import Drafts
from tokenspeed_core.api.policy import Policy
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, LateInputs, StepFailed, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.messages import Outputs, Submit
from tokenspeed_core.engine.wire import Codec, pack
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.kv_cache.pool import PageCounts, PagePool
from tokenspeed_core.scheduler.drafts import HostDrafts
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.model_drafts import ModelDrafts
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

MODEL = FakeModel()
MASKED = 9  # priority of requests that get a mask
FULL = FullAttention("full", 1, 1, 1)
WINDOW = SlidingWindow("window", 1, 1, 1, MODEL.window)
GROUPS: dict[str, tuple[CacheGroupSpec, ...]] = {
    "full": (FULL,),
    "full and window": (FULL, WINDOW),
    "window": (WINDOW,),
}
PLANS, LATE_INPUTS, RESULTS = Codec(StepPlan), Codec(LateInputs), Codec(StepResult)


def allowed(last: int, token: int) -> bool:
    """A grammar for tests: whether `token` may follow `last`."""
    return (last + token) % 3 != 0


class Replayed:
    """Sends every plan as bytes to a second runner too, and compares the results."""

    def __init__(
        self, first: FakeRunner, second: FakeRunner, check: Callable[[StepPlan], None]
    ) -> None:
        self.first, self.second, self.check = first, second, check

    def forward(self, plan: StepPlan) -> None:
        self.check(plan)
        self.first.forward(plan)
        self.second.forward(PLANS.unpack(pack(plan)))

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        self.first.sample(step_id, late)
        self.second.sample(step_id, None if late is None else LATE_INPUTS.unpack(pack(late)))

    def collect(self, step_id: int) -> StepResult:
        try:
            result = self.first.collect(step_id)
        except StepFailed:
            with pytest.raises(StepFailed):
                self.second.collect(step_id)
            raise
        other = RESULTS.unpack(pack(self.second.collect(step_id)))
        assert np.array_equal(result.token_ids, other.token_ids)
        assert np.array_equal(result.num_tokens, other.num_tokens)
        return result

    def close(self) -> None:
        return None


class Masks:
    """Masks of the tokens that the grammar allows after the last known one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def _rows(self, plan: StepPlan) -> list[int]:
        rows = self.scheduler.columns
        return [
            i
            for i, slot in enumerate(plan.slots)
            if plan.wants_logits[i] and rows.priority[slot] == MASKED
        ]

    def wants(self, plan: StepPlan) -> bool:
        return bool(self._rows(plan))

    def late(self, plan: StepPlan) -> LateInputs:
        assert len(self.scheduler.in_flight) == 1, "earlier steps must be collected first"
        indices, bits = [], []
        num_drafts = plan.num_query_tokens - 1
        num_drafts[plan.num_decodes :] = 0
        ends = np.cumsum(num_drafts)
        for row in self._rows(plan):
            last = int(self.scheduler.columns.known(int(plan.slots[row]))[-1])
            drafts: list[int] = []
            if num_drafts[row]:
                assert plan.draft_token_ids is not None
                drafts = plan.draft_token_ids[ends[row] - num_drafts[row] : ends[row]].tolist()
            for token in (last, *drafts):
                indices.append(row)
                bits.append([allowed(token, following) for following in range(MODEL.vocab_size)])
        words = np.packbits(np.asarray(bits), axis=1, bitorder="little").view(np.int32)
        return LateInputs(np.asarray(indices, np.int32), words.ravel())


class Oracle:
    """A drafter that knows the model: it proposes right tokens, wrong ones, and right ones after a wrong one.

    It checks that it sees every token of a sequence, once.
    """

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.tokens: dict[int, list[int]] = {}
        self.finished: list[list[int]] = []
        self.rng = np.random.default_rng(0)

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        assert slot not in self.tokens
        assert len(token_ids) > num_prompt_tokens
        self.tokens[slot] = token_ids.tolist()

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        assert counts.min() > 0
        assert counts.sum() == len(token_ids)
        for slot, part in zip(slots, np.split(token_ids, np.cumsum(counts)[:-1]), strict=True):
            self.tokens[int(slot)] += part.tolist()

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        counts, ids = [], []
        for slot, most in zip(slots.tolist(), max_drafts.tolist(), strict=True):
            counts.append(int(self.rng.integers(0, most + 1)))
            tokens = self.model.expected(self.tokens[slot], counts[-1])
            if counts[-1] and self.rng.random() < 0.6:
                tokens[self.rng.integers(len(tokens))] = int(self.rng.integers(MODEL.vocab_size))
            ids += tokens
        return Drafts(np.asarray(counts, np.int32), np.asarray(ids, np.int32))

    def end(self, slot: int) -> None:
        self.finished.append(self.tokens.pop(slot))


@dataclass
class World:
    """An engine on the fake model, and the output of its sequences."""

    groups: tuple[CacheGroupSpec, ...] = GROUPS["full"]
    num_pages: int = 40
    blocks_per_page: tuple[int, ...] | None = None
    block_size: int = 4
    chunk_size: int = 16
    max_num_seqs: int = 6
    max_model_len: int = 48
    depth: int = 2
    policy: str | Policy = "fcfs"
    prefix_caching: bool = True
    num_drafts: int = 0
    has_draft_model: bool = False
    whole_prompts: bool = False
    max_queued: int = 10_000
    fail_at: frozenset[int] = frozenset()
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    requests: dict[int, Submit] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    scored: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kv = KVManager(
            self.groups,
            self.block_size,
            self.num_pages,
            blocks_per_page=self.blocks_per_page,
            max_chunk=self.chunk_size if self.chunk_size > 0 and not self.whole_prompts else None,
            prefix_caching=self.prefix_caching and not self.whole_prompts,
        )
        limits = SchedulerLimits(
            self.max_num_seqs,
            self.max_model_len,
            self.chunk_size,
            16,
            self.max_queued,
            MODEL.vocab_size,
            max_drafts=self.num_drafts,
            whole_prompts=self.whole_prompts,
        )
        policy = POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        self.model = FakeModel(reads_all=FULL in self.groups)
        self.scheduler = Scheduler(limits, kv, policy)
        if self.num_drafts and self.has_draft_model:
            self.scheduler.use_drafts(
                ModelDrafts(FixedDepth(self.num_drafts), limits, self.scheduler.columns)
            )
        elif self.num_drafts:
            self.drafter = Oracle(self.model)
            self.scheduler.use_drafts(
                HostDrafts(
                    self.drafter,
                    "oracle",
                    FixedDepth(self.num_drafts),
                    limits,
                    self.scheduler.columns,
                    self.scheduler.sequences,
                )
            )
        runners = [
            FakeRunner(
                self.model,
                self.groups,
                self.num_pages,
                self.block_size,
                self.max_num_seqs,
                self.max_model_len,
                blocks_per_page=self.blocks_per_page,
                fail_at=self.fail_at,
            )
            for _ in range(2)
        ]
        self.runner = runners[0]
        self.engine = Engine(
            self.scheduler,
            Replayed(*runners, self.check_prompts),
            depth=self.depth,
            late_source=Masks(self.scheduler),
        )

    def check_prompts(self, plan: StepPlan) -> None:
        """With `whole_prompts`, no row has a part of a prompt, or a prompt and output."""
        for row in range(plan.num_decodes, plan.num_rows) if self.whole_prompts else ():
            sequence_id = int(self.scheduler.columns.sequence_id[plan.slots[row]])
            start, num_prompt = (
                plan.num_computed_tokens[row],
                len(self.requests[sequence_id].prompt),
            )
            assert start >= num_prompt or (start, plan.num_query_tokens[row]) == (0, num_prompt)

    def submit(self, submit: Submit) -> None:
        make_grammar = object if submit.priority == MASKED else None
        rejected = self.scheduler.submit(submit, make_grammar)
        assert rejected is None, rejected
        for i in range(submit.n):
            self.requests[submit.request_id + i] = submit
            self.tokens[submit.request_id + i] = []
            self.scored[submit.request_id + i] = []

    def take(self, outputs: list[Outputs]) -> None:
        for out in outputs:
            for part in out.prompts:
                assert not self.tokens[part.sequence_id], (
                    "log-probabilities precede the first token"
                )
                values = part.chosen.astype(int).tolist()
                self.scored[part.sequence_id] += zip(values, part.ranks.tolist(), strict=True)
                assert len(part.top_ids) == len(values) * part.width
            at = 0
            for i, sequence_id in enumerate(out.sequence_ids.tolist()):
                num = int(out.num_tokens[i])
                if num and not self.tokens[sequence_id]:
                    self.cached[sequence_id] = int(out.num_cached_tokens[i])
                self.tokens[sequence_id] += out.token_ids[at : at + num].tolist()
                at += num
                if out.finish[i]:
                    assert sequence_id not in self.finish, "a sequence ended twice"
                    self.finish[sequence_id] = FinishReason(int(out.finish[i]))

    def step(self) -> None:
        self.take(self.engine.step())

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not finish")

    def check(self, sequence_id: int) -> None:
        """Compare the tokens of a sequence with the oracle."""
        submit, got = self.requests[sequence_id], self.tokens[sequence_id]
        grammar = allowed if submit.priority == MASKED else None
        expected = self.model.expected(submit.prompt.tolist(), len(got), grammar)
        assert got == expected, f"sequence {sequence_id} got {got}, not {expected}"
        stops = [i for i, token in enumerate(got) if token in submit.stop_token_ids]
        assert not stops or (
            stops[0] == len(got) - 1 and self.finish.get(sequence_id) is FinishReason.STOP
        )
        if self.finish.get(sequence_id) is FinishReason.LENGTH:
            assert len(got) == submit.max_tokens
        assert len(got) <= submit.max_tokens
        wanted = submit.prompt_logprobs >= 0 and sequence_id == submit.request_id
        scores = self.model.expected_prompt_logprobs(submit.prompt.tolist()) if wanted else []
        is_complete = got or self.finish.get(sequence_id) is FinishReason.LENGTH
        assert (
            self.scored[sequence_id]
            == scores[: None if is_complete else len(self.scored[sequence_id])]
        )


def audit(pool: PagePool) -> PageCounts:
    """Count the pages in each state and compare with the pool's own counts."""
    free, cached = set(pool._free), set(pool._cached)
    held = {page for page in range(pool.num_pages) if pool._refs[page]}
    rest = set(range(pool.num_pages)) - free - cached - held
    assert not (free & cached or free & held or cached & held), "a page is in two states"
    assert len(free) == len(pool._free), "a page is free twice"
    assert pool.counts() == PageCounts(len(free), len(cached), len(held), len(rest)), (
        "the pool's counts are wrong"
    )
    return pool.counts()
