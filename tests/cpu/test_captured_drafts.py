"""Captured steps verify draft tokens as eager ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from draft_requests import VOCAB, check, known, requests
from drafted import Guesser, Reply, finish, make_engine
from host_graphs import capture_decodes
from tokenspeed_testing.requests import request

from tokenspeed_core.api.step import LateInputs, StepPlan
from tokenspeed_core.worker.captured_step import Bucket
from tokenspeed_core.worker.graphs import StepGraphs
from tokenspeed_core.worker.local import LocalRunner
from tokenspeed_core.worker.staged import BucketSize

MAX_DRAFTS = 4


@pytest.fixture(scope="module")
def runner(make_runner: Callable[..., LocalRunner]) -> LocalRunner:
    return make_runner(
        speculative_algorithm="ngram", speculative_num_draft_tokens=1 + MAX_DRAFTS, max_num_seqs=8
    )


@pytest.fixture(scope="module")
def expected(runner: LocalRunner) -> dict[int, Reply]:
    return finish(make_engine(runner), requests())


@pytest.fixture(scope="module")
def used(runner: LocalRunner, expected: dict[int, Reply]) -> Iterator[list[BucketSize]]:
    with pytest.MonkeyPatch.context() as patch:
        yield capture_decodes(runner, (1, 4, 8), patch)


@pytest.mark.parametrize(("wrong", "depth"), [(0.0, 1), (0.3, 2), (1.0, 1)])
def test_captured_drafts_change_no_output(
    runner: LocalRunner,
    expected: dict[int, Reply],
    used: list[BucketSize],
    wrong: float,
    depth: int,
) -> None:
    used.clear()
    drafter = Guesser(VOCAB, wrong)
    drafter.known = known(expected)
    engine = make_engine(runner, drafter, max_drafts=MAX_DRAFTS, depth=depth)
    check(finish(engine, requests(), preempt_every=9), expected)
    assert len({size for size in used if size.num_draft_tokens}) >= 3
    padding = runner._state.layout.padding_slot
    assert runner._state.seq_len[padding] == 0


def test_one_step_of_a_kind_runs_before_its_capture(
    runner: LocalRunner, expected: dict[int, Reply]
) -> None:
    ran: list[BucketSize] = []
    run_once = StepGraphs._run_once

    def note(graphs: StepGraphs, bucket: Bucket, *others: Any) -> None:
        ran.append(bucket.layout.size)
        run_once(graphs, bucket, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "_run_once", note)
        capture_decodes(runner, (1, 4, 8), patch, with_prompts=True)
        kinds = [(bool(size.num_chunks), bool(size.num_draft_tokens)) for size in ran]
        assert sorted(kinds) == [(False, False), (False, True), (True, False)]
        check(finish(make_engine(runner), requests()), expected)


@pytest.mark.parametrize("with_prompts", [False, True])
def test_drafts_can_be_kept_out_of_steps_with_prompts(
    runner: LocalRunner, expected: dict[int, Reply], with_prompts: bool
) -> None:
    mixed = 0
    with pytest.MonkeyPatch.context() as patch:
        forward = runner.forward

        def note(plan: StepPlan) -> None:
            nonlocal mixed
            mixed += bool(plan.num_draft_tokens and plan.num_rows > plan.num_decodes)
            forward(plan)

        patch.setattr(runner, "forward", note)
        drafter = Guesser(VOCAB, 0.3)
        drafter.known = known(expected)
        engine = make_engine(
            runner,
            drafter,
            max_drafts=MAX_DRAFTS,
            depth=2,
            chunk_size=16,
            with_prompts=with_prompts,
        )
        check(finish(engine, requests()), expected)
    assert bool(mixed) == with_prompts
    assert engine.scheduler.counters.snapshot(engine.scheduler.kv, 0).num_saved_steps


def masks_of(plan: StepPlan) -> LateInputs:
    """Return masks of all rows that sample. They depend on the positions of query tokens only."""
    rows, words = [], []
    for row in np.flatnonzero(plan.wants_logits).tolist():
        end = int(plan.num_computed_tokens[row] + plan.num_query_tokens[row])
        count = int(plan.num_query_tokens[row]) if row < plan.num_decodes else 1
        for position in range(end - count, end):
            rows.append(row)
            random = np.random.default_rng(position)
            words.append(random.integers(-(2**31), 2**31, -(-VOCAB // 32)).astype(np.int32))
    return LateInputs(np.asarray(rows, np.int32), np.concatenate(words))


def test_masks_of_draft_tokens_apply_in_captured_steps(
    runner: LocalRunner, used: list[BucketSize]
) -> None:
    plans: dict[int, StepPlan] = {}
    forward, sample = runner.forward, runner.sample

    def note(plan: StepPlan) -> None:
        plans[plan.step_id] = plan
        forward(plan)

    def masked(step_id: int, late: LateInputs | None) -> None:
        plan = plans.pop(step_id)
        sample(step_id, masks_of(plan) if plan.wants_logits.any() else None)

    wanted = requests()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "forward", note)
        patch.setattr(runner, "sample", masked)
        plain = finish(make_engine(runner), wanted)
        used.clear()
        drafter = Guesser(VOCAB, 0.3)
        drafter.known = [
            [*submit.prompt.tolist(), *plain[submit.request_id + i].token_ids]
            for submit in wanted
            for i in range(submit.n)
        ]
        engine = make_engine(runner, drafter, max_drafts=MAX_DRAFTS)
        check(finish(engine, wanted), plain)
    assert any(size.num_draft_tokens for size in used)
    assert engine.scheduler.counters.snapshot(engine.scheduler.kv, 0).num_saved_steps > 10


def test_largest_bucket_may_have_no_padding_tokens(
    runner: LocalRunner, used: list[BucketSize]
) -> None:
    prompts = [[10 * number + i for i in range(9)] for number in range(4)]
    wanted = [request(number, prompt, max_tokens=30) for number, prompt in enumerate(prompts)]
    plain = finish(make_engine(runner), wanted)
    used.clear()

    class Everything(Guesser):
        def guess(self, tokens: list[int], most: int) -> list[int]:
            found = [each for each in self.known if each[: len(tokens)] == tokens]
            right = found[0][len(tokens) :][:most]
            return right + [1] * (most - len(right))

    drafter = Everything(VOCAB)
    drafter.known = [[*prompt, *plain[n].token_ids] for n, prompt in enumerate(prompts)]
    found = finish(make_engine(runner, drafter, max_drafts=MAX_DRAFTS), wanted)
    assert {n: reply.token_ids for n, reply in found.items()} == {
        n: reply.token_ids for n, reply in plain.items()
    }
    assert BucketSize(4, 0, 0, num_draft_tokens=16) in used


def test_steps_with_many_drafts_run_eagerly(runner: LocalRunner, used: list[BucketSize]) -> None:
    assert runner._graphs is not None
    largest = runner._graphs._finder._drafts[-1]
    assert largest == BucketSize(8, 0, 0, num_draft_tokens=8 * MAX_DRAFTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._graphs._finder, "_drafts", [])
        used.clear()
        wanted = [request(0, [5, 6, 7], max_tokens=12)]
        plain = finish(make_engine(runner), wanted)
        drafter = Guesser(VOCAB, 0.0)
        drafter.known = [[5, 6, 7, *plain[0].token_ids]]
        found = finish(make_engine(runner, drafter, max_drafts=MAX_DRAFTS), wanted)
    assert found[0].token_ids == plain[0].token_ids
    assert not any(size.num_draft_tokens for size in used)


def test_state_is_equal_after_captured_and_eager_steps(
    runner: LocalRunner, used: list[BucketSize]
) -> None:
    states = []
    assert runner._graphs is not None
    finder = runner._graphs._finder
    for sizes in (finder._drafts, []):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(finder, "_drafts", sizes)
            drafter = Guesser(VOCAB, 0.4, seed=3)
            finish(
                make_engine(runner, drafter, max_drafts=MAX_DRAFTS),
                [request(n, [n, n + 1], max_tokens=9) for n in range(3)],
            )
        slots = torch.from_numpy(np.arange(runner._state.layout.padding_slot))
        states.append(torch.stack((runner._state.last_token[slots], runner._state.seq_len[slots])))
    assert torch.equal(*states)
