"""Conformance of a scheduling policy, as a class to inherit: generated views and invariants.

Subclasses set `make = staticmethod(MyPolicy)`, the factory that the entry names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import ClassVar

import numpy as np

from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View

NUM_VIEWS = 300


class PolicyConformance:
    """Checks of a policy."""

    make: ClassVar[Callable[[], Policy]]

    def test_factory_makes_a_policy(self) -> None:
        """The factory takes no arguments and makes a Policy."""
        assert isinstance(type(self).make(), Policy)

    def test_rows_and_prompts_stay_in_the_budget(self) -> None:
        """No row gets more than it wants, and chunks share the budget that decodes leave."""
        for view, limits in views():
            decision = self._decide(view, limits)
            got, num = decision.num_query_tokens, view.num_decodes
            assert ((got >= 0) & (got <= view.num_query_tokens)).all(), (
                f"{got} of {view.num_query_tokens}"
            )
            if limits.is_chunking:
                left = max(0, limits.token_budget - int(got[:num].sum()))
                assert int(got[num:].sum()) <= min(left, limits.max_prefill_tokens), (
                    f"{got} of {limits}"
                )

    def test_running_rows_have_their_blocks(self) -> None:
        """Running rows fit into the available blocks; victims are distinct and do not run."""
        for view, limits in views():
            decision = self._decide(view, limits)
            runs = decision.num_query_tokens > 0
            assert int(view.num_new_pages[runs].sum()) <= limits.num_available_pages, (
                f"{decision} of {limits}"
            )
            assert len(set(decision.victims.tolist())) == len(decision.victims)
            assert not runs[decision.victims].any(), "a victim runs"

    def test_all_decodes_run_when_there_are_blocks(self) -> None:
        """No decode stalls and no row is preempted while there is room."""
        for view, limits in views():
            if int(view.num_new_pages.sum()) <= limits.num_available_pages:
                decision = self._decide(view, limits)
                num = view.num_decodes
                assert np.array_equal(decision.num_query_tokens[:num], view.num_query_tokens[:num])
                assert not len(decision.victims)

    def test_blocked_step_preempts(self) -> None:
        """If no row fits and no blocks are pending, rows are preempted."""
        for view, limits in views():
            decision = self._decide(view, limits)
            others_hold = int(view.num_held_pages.sum()) - view.num_held_pages
            could = (
                bool((view.num_new_pages <= limits.num_available_pages + others_hold).all())
                and len(view.slots) > 1
            )
            runs = bool(decision.num_query_tokens.any()) or len(decision.victims) > 0
            assert runs or limits.num_pending_pages or not could, (
                f"the step runs nothing and preempts nothing: {view} {limits}"
            )

    def test_decision_is_pure(self) -> None:
        """The same view gives the same decision; its columns are read-only."""
        for view, limits in views():
            first, second = self._decide(view, limits), self._decide(view, limits)
            assert np.array_equal(first.num_query_tokens, second.num_query_tokens)
            assert np.array_equal(first.victims, second.victims)

    def test_admission_fits_the_room(self) -> None:
        """A first chunk fits the budget, and an empty server admits any sequence."""
        policy = type(self).make()
        for candidate, room in admissions():
            chunk = policy.admit(candidate, room)
            rest = candidate.num_tokens - candidate.num_cached_tokens
            assert 0 <= chunk <= rest
            if room.is_chunking:
                assert chunk <= room.token_budget
            fits = candidate.num_new_pages + candidate.num_idle_pages <= room.num_available_pages
            assert fits or not chunk, "it admits a sequence without blocks"
            if room.is_alone and fits and (room.is_chunking or rest <= room.token_budget):
                assert chunk, f"{candidate} is refused by an empty server"

    def _decide(self, view: View, limits: Limits) -> Decision:
        decision = type(self).make().decide(view, limits)
        assert decision.num_query_tokens.shape == view.num_query_tokens.shape
        return decision


def views(num: int = NUM_VIEWS) -> Iterator[tuple[View, Limits]]:
    """Yield random rows, decodes first and prompts by arrival, with random limits."""
    random = np.random.default_rng(7)
    for _ in range(num):
        decodes, prompts = int(random.integers(0, 7)), int(random.integers(0, 6))
        rows = decodes + prompts
        arrival = random.permutation(rows)
        arrival[decodes:] = np.sort(arrival[decodes:])
        view = View(
            slots=random.permutation(rows).astype(np.int32),
            num_decodes=decodes,
            num_query_tokens=np.concatenate(
                [random.integers(1, 6, decodes), random.integers(1, 61, prompts)]
            ).astype(np.int32),
            num_new_pages=random.integers(0, 4, rows).astype(np.int32),
            num_held_pages=random.integers(0, 7, rows).astype(np.int32),
            priority=random.integers(0, 3, rows).astype(np.int32),
            arrival=arrival.astype(np.int64),
        )
        for field in fields(View):
            column = getattr(view, field.name)
            if isinstance(column, np.ndarray):
                column.setflags(write=False)
        yield (
            view,
            Limits(
                token_budget=int(random.integers(1, 65)),
                max_prefill_tokens=int(random.integers(1, 65)),
                is_chunking=bool(random.integers(0, 2)),
                num_available_pages=int(random.integers(0, 13)),
                num_pending_pages=int(random.integers(0, 7)),
            ),
        )


def admissions(num: int = NUM_VIEWS) -> Iterator[tuple[Candidate, Room]]:
    """Yield random waiting sequences with random room."""
    random = np.random.default_rng(11)
    for _ in range(num):
        hit = int(random.integers(0, 41))
        is_alone = bool(random.integers(0, 2))
        yield (
            Candidate(
                num_tokens=hit + int(random.integers(1, 61)),
                num_cached_tokens=hit,
                num_new_pages=int(random.integers(0, 21)),
                num_idle_pages=min(hit, int(random.integers(0, 11))),
            ),
            Room(
                token_budget=int(random.integers(1, 65)),
                is_chunking=bool(random.integers(0, 2)),
                num_available_pages=int(random.integers(0, 31)),
                num_promised_pages=0 if is_alone else int(random.integers(0, 21)),
                num_decoding=0 if is_alone else int(random.integers(0, 7)),
                is_alone=is_alone,
            ),
        )
