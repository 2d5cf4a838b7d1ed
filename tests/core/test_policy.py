"""The built-in policies: properties for any view and limits, and simulations of many steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tokenspeed_core.api.policy import (
    Candidate,
    Decision,
    Limits,
    Policy,
    QueuedSequence,
    Room,
    View,
)
from tokenspeed_core.scheduler.policy import POLICIES

MANY = 10_000
BLOCK = 4  # tokens, in the simulation

policies = st.sampled_from([POLICIES["fcfs"], POLICIES["priority"]])


@st.composite
def views(draw: st.DrawFn) -> View:
    """Read-only rows in the scheduler's order: decodes, then prompts by arrival."""
    num_decodes, num_prompts = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    num = num_decodes + num_prompts
    arrival = draw(st.permutations(range(num)))
    arrival[num_decodes:] = sorted(arrival[num_decodes:])

    def column(least: int, most: int, length: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=length, max_size=length))

    view = View(
        slots=np.asarray(draw(st.permutations(range(num))), np.int32),
        num_decodes=num_decodes,
        num_query_tokens=np.asarray(
            column(1, 5, num_decodes) + column(1, 60, num_prompts), np.int32
        ),
        num_new_pages=np.asarray(column(0, 3, num), np.int32),
        num_held_pages=np.asarray(column(0, 6, num), np.int32),
        priority=np.asarray(column(0, 2, num), np.int32),
        arrival=np.asarray(arrival, np.int64),
    )
    for each in (
        view.slots,
        view.num_query_tokens,
        view.num_new_pages,
        view.num_held_pages,
        view.priority,
        view.arrival,
    ):
        each.setflags(write=False)
    return view


limits = st.builds(
    Limits,
    token_budget=st.integers(1, 64),
    max_prefill_tokens=st.integers(1, 64),
    is_chunking=st.booleans(),
    num_available_pages=st.integers(0, 12),
    num_pending_pages=st.integers(0, 6),
)
rooms = st.builds(
    Room,
    token_budget=st.integers(1, 64),
    is_chunking=st.booleans(),
    num_available_pages=st.integers(0, 30),
    num_promised_pages=st.integers(0, 20),
    num_decoding=st.integers(0, 6),
    is_alone=st.booleans(),
)
candidates = st.builds(
    lambda hit, rest, blocks, idle: Candidate(hit + rest, hit, blocks, min(idle, hit)),
    st.integers(0, 40),
    st.integers(1, 60),
    st.integers(0, 20),
    st.integers(0, 10),
)


def queued(priority: int, arrival: int) -> QueuedSequence:
    """Return a sequence of the waiting queue."""
    return QueuedSequence(priority, arrival, num_tokens=8, max_tokens=8, tenant="")


def order(policy: Policy, view: View) -> list[int]:
    """Return the rows of a view, most important first."""
    columns = zip(view.priority, view.arrival, strict=True)
    keys = [policy.key(queued(int(priority), int(arrival))) for priority, arrival in columns]
    return sorted(range(len(keys)), key=keys.__getitem__)


def prompts(policy: Policy, view: View) -> list[int]:
    """Return the prompt rows of a view, most important first."""
    return [row for row in order(policy, view) if row >= view.num_decodes]


def chunks(view: View, decision: Decision) -> list[int]:
    chunks: list[int] = decision.num_query_tokens[view.num_decodes :].tolist()
    return chunks


@given(policies, views(), limits)
def test_prompts_fit_the_budget_left_by_decodes(policy: Policy, view: View, limits: Limits) -> None:
    decision = policy.decide(view, replace(limits, is_chunking=True))
    decodes = int(decision.num_query_tokens[: view.num_decodes].sum())
    assert sum(chunks(view, decision)) <= max(0, limits.token_budget - decodes)
    assert sum(chunks(view, decision)) <= limits.max_prefill_tokens
    assert (decision.num_query_tokens <= view.num_query_tokens).all()
    assert (decision.num_query_tokens >= 0).all()


@given(policies, views(), limits)
def test_without_chunking_prompts_run_whole(
    policy: Policy,
    view: View,
    limits: Limits,
) -> None:
    decision = policy.decide(view, replace(limits, is_chunking=False))
    wanted = view.num_query_tokens[view.num_decodes :].tolist()
    got = chunks(view, decision)
    assert all(each in (0, want) for each, want in zip(got, wanted, strict=True))
    left = max(0, limits.token_budget - int(decision.num_query_tokens[: view.num_decodes].sum()))
    assert sum(got) <= left or sum(each > 0 for each in got) <= 1


@given(policies, views(), limits)
def test_without_chunking_the_first_prompt_runs(policy: Policy, view: View, limits: Limits) -> None:
    assume(len(view.slots) > view.num_decodes)
    decision = policy.decide(view, replace(limits, is_chunking=False, num_available_pages=MANY))
    first = prompts(policy, view)[0]
    assert decision.num_query_tokens[first] == view.num_query_tokens[first]


@given(policies, views(), limits)
def test_decodes_run_if_blocks_suffice(policy: Policy, view: View, limits: Limits) -> None:
    decision = policy.decide(view, replace(limits, num_available_pages=MANY))
    assert np.array_equal(
        decision.num_query_tokens[: view.num_decodes], view.num_query_tokens[: view.num_decodes]
    )
    assert len(decision.victims) == 0


@given(policies, views(), limits)
def test_prompts_get_tokens_in_order(
    policy: Policy,
    view: View,
    limits: Limits,
) -> None:
    limits = replace(limits, num_available_pages=MANY, is_chunking=True)
    decision, rows = policy.decide(view, limits), prompts(policy, view)
    got = decision.num_query_tokens[rows].tolist()
    wanted = view.num_query_tokens[rows].tolist()
    for i, each in enumerate(got):
        if each:
            assert got[:i] == wanted[:i]


@given(policies, views(), limits)
def test_running_rows_fit_the_available_blocks(policy: Policy, view: View, limits: Limits) -> None:
    decision = policy.decide(view, limits)
    assert (
        int(view.num_new_pages[decision.num_query_tokens > 0].sum()) <= limits.num_available_pages
    )


@given(policies, views(), limits)
def test_victims_are_distinct_and_do_not_run(policy: Policy, view: View, limits: Limits) -> None:
    decision = policy.decide(view, limits)
    assert not decision.num_query_tokens[decision.victims].any()
    assert len(set(decision.victims.tolist())) == len(decision.victims)


@given(policies, views(), limits)
def test_lowest_priority_rows_are_preempted(policy: Policy, view: View, limits: Limits) -> None:
    decision = policy.decide(view, limits)
    last_first = order(policy, view)[::-1]
    assert decision.victims.tolist() == last_first[: len(decision.victims)]
    assert len(decision.victims) < max(1, len(view.slots))


@given(policies, views(), limits)
def test_pending_blocks_prevent_preemption(policy: Policy, view: View, limits: Limits) -> None:
    assume(int(view.num_new_pages.sum()) <= limits.num_available_pages + limits.num_pending_pages)
    assert len(policy.decide(view, limits).victims) == 0


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # few views lack blocks
@given(policies, views(), limits)
def test_every_victim_is_needed(policy: Policy, view: View, limits: Limits) -> None:
    victims = policy.decide(view, limits).victims.tolist()
    assume(victims)
    coming = limits.num_pending_pages + int(view.num_held_pages[victims[:-1]].sum())
    stays = [row for row in range(len(view.slots)) if row not in victims[:-1]]
    assert int(view.num_new_pages[stays].sum()) > limits.num_available_pages + coming


@given(policies, views(), limits)
def test_victims_suffice_for_the_other_rows(
    policy: Policy,
    view: View,
    limits: Limits,
) -> None:
    assume(len(view.slots) > 0)
    victims = policy.decide(view, limits).victims.tolist()
    supply = (
        limits.num_available_pages
        + limits.num_pending_pages
        + int(view.num_held_pages[victims].sum())
    )
    stays = order(policy, view)[: len(view.slots) - len(victims)]
    assert (
        int(view.num_new_pages[stays].sum()) <= supply
        or int(view.num_new_pages[stays[:-1]].sum()) <= supply
    )


@given(policies, views(), limits)
def test_blocks_go_to_more_important_rows_first(
    policy: Policy,
    view: View,
    limits: Limits,
) -> None:
    decision, rows = policy.decide(view, limits), order(policy, view)
    claimed = np.cumsum(view.num_new_pages[rows])
    for row in np.asarray(rows, np.int64)[claimed > limits.num_available_pages]:
        assert not (view.num_new_pages[row] and decision.num_query_tokens[row])


@given(policies, views(), limits)
def test_highest_priority_row_gets_its_blocks(
    policy: Policy,
    view: View,
    limits: Limits,
) -> None:
    assume(len(view.slots) > 0)
    first, *others = order(policy, view)
    decision = policy.decide(view, limits)
    need = int(view.num_new_pages[first])
    if need <= limits.num_available_pages:
        is_decode = first < view.num_decodes
        assert not is_decode or decision.num_query_tokens[first] == view.num_query_tokens[first]
    elif need > limits.num_available_pages + limits.num_pending_pages:
        freed = int(view.num_held_pages[decision.victims].sum())
        assert need <= limits.num_available_pages + limits.num_pending_pages + freed or len(
            decision.victims
        ) == len(others)


@given(policies, views(), limits)
def test_decide_is_pure(policy: Policy, view: View, limits: Limits) -> None:
    before = view.num_query_tokens.copy()
    once, again = policy.decide(view, limits), policy.decide(view, limits)
    assert np.array_equal(once.num_query_tokens, again.num_query_tokens)
    assert np.array_equal(once.victims, again.victims)
    assert np.array_equal(view.num_query_tokens, before)
    assert not np.shares_memory(once.num_query_tokens, view.num_query_tokens)


@given(policies, candidates, rooms)
def test_admission_leaves_promised_blocks(
    policy: Policy,
    candidate: Candidate,
    room: Room,
) -> None:
    room = replace(room, is_alone=False)
    if policy.admit(candidate, room):
        taken = candidate.num_new_pages + candidate.num_idle_pages
        assert taken + room.num_promised_pages + room.num_decoding <= room.num_available_pages


@given(policies, candidates, rooms)
def test_admission_fits_the_available_blocks(
    policy: Policy,
    candidate: Candidate,
    room: Room,
) -> None:
    if policy.admit(candidate, room):
        assert candidate.num_new_pages + candidate.num_idle_pages <= room.num_available_pages


@given(policies, candidates, rooms)
def test_first_chunk_fits_the_budget(
    policy: Policy,
    candidate: Candidate,
    room: Room,
) -> None:
    num, rest = policy.admit(candidate, room), candidate.num_tokens - candidate.num_cached_tokens
    assert 0 <= num <= min(rest, room.token_budget)
    if not room.is_chunking:
        assert num in (0, rest)


@given(policies, candidates, rooms)
def test_lone_candidate_that_fits_is_admitted(
    policy: Policy, candidate: Candidate, room: Room
) -> None:
    assume(candidate.num_new_pages + candidate.num_idle_pages <= room.num_available_pages)
    room = replace(room, is_alone=True, is_chunking=True)
    assert policy.admit(candidate, room) == min(
        candidate.num_tokens - candidate.num_cached_tokens, room.token_budget
    )


@pytest.mark.parametrize(("name", "first"), [("fcfs", (9, 1)), ("priority", (0, 2))])
def test_queue_follows_the_policy_order(name: str, first: tuple[int, int]) -> None:
    policy = POLICIES[name]
    assert min([(9, 1), (0, 2), (0, 3)], key=lambda each: policy.key(queued(*each))) == first


@dataclass(eq=False)
class Row:
    """A sequence of the simulation. Lengths are in tokens, `held` in blocks."""

    arrival: int
    priority: int
    num_prompt: int
    num_output: int
    num_made: int = 0
    num_done: int = 0
    target: int = 0
    held: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_done >= self.target

    def short(self, end: int) -> int:
        return max(0, -(-end // BLOCK) - self.held)


class Simulation:
    """Steps of a policy on sequences that have only lengths. Blocks of victims are free one step later."""

    def __init__(
        self, policy: Policy, rows: list[Row], num_pages: int, budget: int, *, is_chunking: bool
    ) -> None:
        self.policy, self.budget, self.is_chunking = policy, budget, is_chunking
        self.waiting, self.running, self.finished = list(rows), list[Row](), list[Row]()
        self.free, self.coming = num_pages, 0

    def step(self) -> int:
        """Run a step and return its query tokens."""
        decoding = [row for row in self.running if row.is_decoding]
        prompts = sorted(
            (row for row in self.running if not row.is_decoding), key=lambda row: row.arrival
        )
        rows = decoding + prompts
        view = View(
            np.arange(len(rows), dtype=np.int32),
            len(decoding),
            np.asarray(
                [1 if row.is_decoding else row.target - row.num_done for row in rows], np.int32
            ),
            np.asarray([row.short(row.num_done + 1) for row in rows], np.int32),
            np.asarray([row.held for row in rows], np.int32),
            np.asarray([row.priority for row in rows], np.int32),
            np.asarray([row.arrival for row in rows], np.int64),
        )
        decision = self.policy.decide(
            view, Limits(self.budget, self.budget, self.is_chunking, self.free, self.coming)
        )
        released = sum(self._leave(rows[victim], self.waiting) for victim in decision.victims)
        used = 0
        for row, num in zip(rows, decision.num_query_tokens.tolist(), strict=True):
            used += self._run(row, num) if num else 0
        used += self._admit(self.budget - used, any(decision.num_query_tokens[len(decoding) :]))
        released += sum(
            self._leave(row, self.finished) for row in decoding if row.num_made == row.num_output
        )
        self.free, self.coming = self.free + self.coming, released
        return used

    def _run(self, row: Row, num: int) -> int:
        num = min(num, (row.held + self.free) * BLOCK - row.num_done)
        short = row.short(row.num_done + num)
        self.free, row.held = self.free - short, row.held + short
        row.num_made += row.is_decoding
        row.num_done += num
        assert self.free >= 0, "the policy used a block twice"
        return num

    def _admit(self, budget: int, is_prompt_running: bool) -> int:
        used = 0
        while self.waiting and budget > used:
            row = min(
                self.waiting, key=lambda row: self.policy.key(queued(row.priority, row.arrival))
            )
            known = row.num_prompt + row.num_made
            promised = sum(
                each.short(each.target + 1) for each in self.running if not each.is_decoding
            )
            can_exceed = not self.is_chunking and not is_prompt_running and not used
            room = Room(
                1000 if can_exceed else budget - used,
                self.is_chunking,
                self.free,
                promised,
                sum(each.is_decoding for each in self.running),
                is_alone=not self.running and not self.coming,
            )
            num = self.policy.admit(Candidate(known, 0, row.short(known + 1), 0), room)
            if not num:
                break
            row.target = known
            self.waiting.remove(row)
            self.running.append(row)
            used += self._run(row, num)
        return used

    def _leave(self, row: Row, where: list[Row]) -> int:
        self.running.remove(row)
        where.append(row)
        held, row.held, row.num_done = row.held, 0, 0
        return held


simulated = st.lists(
    st.builds(Row, st.just(0), st.integers(0, 2), st.integers(1, 30), st.integers(1, 25)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(policies, simulated, st.integers(0, 20), st.integers(1, 40), st.booleans())
@example(POLICIES["fcfs"], [Row(0, 0, 3, 25) for _ in range(8)], 0, 8, True)
def test_all_sequences_finish_in_a_small_pool(
    policy: Policy,
    rows: list[Row],
    spare: int,
    budget: int,
    is_chunking: bool,
) -> None:
    rows = [replace(row, arrival=i) for i, row in enumerate(rows)]
    least = max(-(-(row.num_prompt + row.num_output) // BLOCK) for row in rows)
    world = Simulation(policy, rows, least + spare, budget, is_chunking=is_chunking)
    num_idle = 0
    while len(world.finished) < len(rows):
        num_idle = 0 if world.step() else num_idle + 1
        assert num_idle < 3, "there is work and nothing runs"
    assert world.free + world.coming == least + spare


@settings(max_examples=50, deadline=None)
@given(simulated, st.integers(1, 40))
def test_first_sequence_is_not_delayed(rows: list[Row], budget: int) -> None:
    rows = [replace(row, arrival=i) for i, row in enumerate(rows)]
    budget += len(rows)  # for the decodes of others
    least = max(-(-(row.num_prompt + row.num_output) // BLOCK) for row in rows)

    def steps_until_first_ends(rows: list[Row]) -> int:
        world = Simulation(
            POLICIES["fcfs"], [replace(row) for row in rows], least, budget, is_chunking=True
        )
        for count in range(1000):
            if any(row.arrival == 0 for row in world.finished):
                return count
            world.step()
        raise AssertionError("the first starves")

    # Blocks of victims are free one step later: at most one wait per block of the first sequence.
    assert steps_until_first_ends(rows) <= steps_until_first_ends(rows[:1]) + least
