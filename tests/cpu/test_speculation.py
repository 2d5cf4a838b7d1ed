"""Outputs do not depend on draft tokens, whatever a drafter proposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from draft_grammars import (
    BACKENDS,
    characters,
    grammar_backend,
    grammar_requests,
    grammars_of,
    num_matches,
)
from draft_requests import VOCAB, check, known, requests
from draft_statistics import accept_by_force, chi_square, expected_counts
from drafted import Guesser, Reply, check_starts, finish, make_engine, random_requests, soak
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenspeed_drafters.match_index import BYTES_PER_TOKEN
from tokenspeed_testing.drafts import FixedDepth
from tokenspeed_testing.requests import request

from tokenspeed_core.api.drafters import DrafterContext, DrafterSpec, Drafts
from tokenspeed_core.api.step import I32
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner


@pytest.fixture(scope="module")
def runner(make_runner: Callable[..., LocalRunner]) -> LocalRunner:
    return make_runner(speculative_algorithm="ngram", speculative_num_draft_tokens=6)


@pytest.fixture(scope="module")
def expected(runner: LocalRunner) -> dict[int, Reply]:
    return finish(make_engine(runner), requests())


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drafts=st.integers(1, 5),
    chunk=st.sampled_from([-1, 8, 13, 64]),
    num_pages=st.sampled_from([22, 40, None]),
    depth=st.integers(1, 3),
    caching=st.booleans(),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
    preempt_every=st.sampled_from([0, 4]),
)
def test_drafts_change_no_output(
    runner: LocalRunner,
    expected: dict[int, Reply],
    drafts: int,
    chunk: int,
    num_pages: int | None,
    depth: int,
    caching: bool,
    wrong: float,
    preempt_every: int,
) -> None:
    drafter = Guesser(VOCAB, wrong)
    drafter.known = known(expected)
    engine = make_engine(
        runner,
        drafter,
        max_drafts=drafts,
        num_pages=num_pages,
        depth=depth,
        caching=caching,
        chunk_size=chunk,
        max_prefill_tokens=64,
    )
    found = finish(engine, requests(), preempt_every=preempt_every)
    check(found, expected)
    pool = engine.scheduler.kv.pool
    assert pool.num_available == pool.num_pages
    assert not drafter.tokens, "every sequence ended"
    stats = engine.scheduler.counters.snapshot(engine.scheduler.kv, 0)
    assert stats.num_draft_tokens >= stats.num_draft_rows > 0
    assert list(stats.num_accepted) == sorted(stats.num_accepted, reverse=True)
    if wrong == 0.0 and not preempt_every:
        assert stats.num_saved_steps > 0.5 * stats.num_draft_tokens


class Alternating(FixedDepth):
    """Wants no draft tokens in a part of the steps."""

    num_calls = 0

    def max_drafts(self, num_rows: int) -> int:
        self.num_calls += 1
        return super().max_drafts(num_rows) * (self.num_calls // 4 % 2)


def test_steps_without_drafts_may_follow_steps_with_them(
    runner: LocalRunner, expected: dict[int, Reply]
) -> None:
    drafter = Guesser(VOCAB, 0.3)
    drafter.known = known(expected)
    engine = make_engine(runner, drafter, max_drafts=3, depth=2, draft_depth=Alternating(3))
    check(finish(engine, requests()), expected)
    assert engine.scheduler.counters.snapshot(engine.scheduler.kv, 0).num_saved_steps


class Failing(Guesser):
    """Raises, or makes an invalid proposal, after some calls."""

    num_calls = 0

    def __init__(self, how: str) -> None:
        super().__init__(VOCAB)
        self.how = how

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        self.num_calls += 1
        if self.num_calls < 5:
            return super().propose(slots, max_drafts)
        if self.how == "raises":
            raise RuntimeError("no idea")
        ones = np.ones(len(slots), np.int32)
        if self.how == "too many":
            return Drafts(max_drafts + 1, np.zeros(int(max_drafts.sum()) + len(slots), np.int32))
        return Drafts(ones, ones * VOCAB)

    def end(self, slot: int) -> None:
        if self.how == "cannot end":
            raise RuntimeError("no end")
        super().end(slot)


@pytest.mark.parametrize("how", ["raises", "too many", "no such token", "cannot end"])
def test_failing_drafter_is_switched_off(
    runner: LocalRunner, expected: dict[int, Reply], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(runner, Failing(how), max_drafts=2, depth=2)
    check(finish(engine, requests()), expected)
    assert [record.message for record in caplog.records if "guesser failed" in record.message]


class FewTokens(Guesser):
    """Proposes any of a few tokens."""

    tokens_of_model: tuple[int, ...] = ()

    def guess(self, tokens: list[int], most: int) -> list[int]:
        return self.random.choice(self.tokens_of_model, most).tolist()


POSSIBLE = (11, 23, 57)
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 3,
    "bias_ids": np.asarray(POSSIBLE, np.int32),
    "bias_values": np.full(3, 90.0, np.float32),
}


@pytest.fixture(scope="module")
def expected_starts(runner: LocalRunner) -> dict[tuple[int, ...], float]:
    return expected_counts(runner, 500, VOCAB, **SAMPLING)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_sampled_tokens_follow_the_distribution_of_the_model(
    runner: LocalRunner,
    expected_starts: dict[tuple[int, ...], float],
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A share of the draft tokens is accepted by force. If it is not 0, the statistic exceeds its limit."""
    if share:
        accept_by_force(runner, share, monkeypatch)
    drafter = FewTokens(VOCAB)
    drafter.tokens_of_model = POSSIBLE
    engine = make_engine(runner, drafter, max_drafts=2)
    statistic = chi_square(engine, expected_starts, **SAMPLING)
    assert (statistic > 1) == (share > 0)
    stats = engine.scheduler.counters.snapshot(engine.scheduler.kv, 0)
    assert stats.num_accepted[1] > 20


@pytest.mark.parametrize("num_requests", [60, pytest.param(5000, marks=pytest.mark.release)])
def test_blocks_are_free_after_requests_with_aborts(
    runner: LocalRunner, expected: dict[int, Reply], num_requests: int
) -> None:
    drafter = Guesser(VOCAB, 0.2)
    drafter.known = known(expected)
    engine = make_engine(runner, drafter, max_drafts=4, num_pages=40, depth=2)
    soak(engine, random_requests(requests(), num_requests))
    assert not drafter.tokens
    assert engine.scheduler.drafts is not None
    assert not engine.scheduler.drafts._is_off  # type: ignore[attr-defined]


OPTIONS = {"ngram": {}, "suffix": {"suffix_answers": 1024, "suffix_answers_per_key": 512}}


@pytest.mark.parametrize(
    ("name", "grammars", "num_requests"),
    [
        ("ngram", BACKENDS[0], 60),
        ("suffix", BACKENDS[-1], 60),
        *(
            pytest.param(name, grammars, 5000, marks=pytest.mark.release)
            for name in ("ngram", "suffix")
            for grammars in BACKENDS
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_host_drafters_free_all_state(
    runner: LocalRunner, catalog: Catalog, name: str, grammars: str, num_requests: int
) -> None:
    """With requests of every kind by four tenants, some with a grammar, some that repeat tokens."""
    limits = runner.resolved.limits
    context = DrafterContext(VOCAB, limits.max_num_seqs, limits.max_model_len, 4, OPTIONS[name])
    drafter = catalog.need(catalog.get("drafters", name), DrafterSpec).make(context)
    backend = grammar_backend(grammars, catalog, runner, characters(VOCAB, " "))
    repeated = [[5, 6, 7, 8, 9] * (2 + i % 4) for i in range(10)]
    kinds = [
        *requests(),
        *grammar_requests(backend, repeated[:5]),
        *(request(0, prompt, max_tokens=20, temperature=0.7) for prompt in repeated[5:]),
    ]
    kinds = [structs.replace(each, tenant="abcd"[i % 4]) for i, each in enumerate(kinds)]
    made = random_requests(kinds, num_requests)
    plain = finish(make_engine(runner, grammars=grammars_of(backend)), made[:60])
    engine = make_engine(
        runner, drafter, max_drafts=4, num_pages=40, depth=2, grammars=grammars_of(backend)
    )
    replies = soak(engine, made)
    check_starts(replies[:60], plain)
    assert num_matches(backend, replies) > 0.05 * num_requests
    assert not engine.scheduler.drafts._is_off  # type: ignore[union-attr]
    if name == "ngram":
        assert not any(drafter._num_tokens)
    else:
        assert not drafter._sequences
        tenants = drafter._tenants
        assert 0 < tenants.num_bytes <= BYTES_PER_TOKEN * OPTIONS[name]["suffix_answers"]
    stats = engine.scheduler.counters.snapshot(engine.scheduler.kv, 0)
    assert stats.num_saved_steps > 0.5 * num_requests


def test_drafter_separates_keys_and_cache_salts(runner: LocalRunner) -> None:
    seen: set[str] = set()

    class Observer(Guesser):
        def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
            super().begin(slot, token_ids, num_prompt_tokens, tenant)
            seen.add(tenant)

    names = [("", ""), ("", "a"), ("a", ""), ("b", "a"), ("ba", "")]
    finish(
        make_engine(runner, Observer(VOCAB), max_drafts=2),
        [
            request(i, [1, 2, 3], max_tokens=4, tenant=tenant, cache_salt=salt)
            for i, (tenant, salt) in enumerate(names)
        ],
    )
    assert len(seen) == len(names)
