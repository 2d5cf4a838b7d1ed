"""Engines with a drafter that knows the answers, or with a draft model, and their outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tokenspeed_testing.drafts import FixedDepth

from tokenspeed_core.api.drafters import Drafter, Drafts
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.grammars import Grammars
from tokenspeed_core.engine.messages import PromptLogprobs, Submit, TokenLogprobs
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.drafts import DraftDepth, HostDrafts
from tokenspeed_core.scheduler.model_drafts import ModelDrafts
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.worker.local import LocalRunner


@dataclass
class Reply:
    """The output of a sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish: int = 0
    logprobs: list[list[int]] = field(default_factory=list)  # rank and top ids
    values: list[float] = field(default_factory=list)
    prompt_logprobs: list[list[int]] = field(default_factory=list)  # rank and top ids
    prompt_values: list[float] = field(default_factory=list)

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        shape = (len(part.chosen), part.width)
        columns = (
            part.chosen,
            part.ranks,
            part.top_ids.reshape(shape),
            part.top_values.reshape(shape),
        )
        for value, rank, ids, values in zip(*(each.tolist() for each in columns), strict=True):
            self.prompt_logprobs.append([rank, *ids])
            self.prompt_values += [value, *values]

    def add_logprobs(self, columns: TokenLogprobs, num_top: int) -> None:
        for value, rank, top in zip(columns.chosen, columns.ranks, columns.top, strict=True):
            self.logprobs.append([rank, *(token_id for token_id, _ in top[:num_top])])
            self.values += [value, *(each for _, each in top[:num_top])]


class Guesser:
    """Proposes the tokens of known sequences, of which a share is replaced by random ones."""

    def __init__(self, vocab_size: int, wrong: float = 0.3, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.wrong = wrong
        self.known: list[list[int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.random = np.random.default_rng(seed)

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        self.tokens[slot] = token_ids.tolist()

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        parts = np.split(token_ids, np.cumsum(counts)[:-1])
        for slot, part in zip(slots.tolist(), parts, strict=True):
            self.tokens[slot] += part.tolist()

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        guesses = [
            self.guess(self.tokens[slot], most)
            for slot, most in zip(slots.tolist(), max_drafts.tolist(), strict=True)
        ]
        counts = np.asarray([len(each) for each in guesses], np.int32)
        return Drafts(counts, np.asarray([i for each in guesses for i in each], np.int32))

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """Return up to `most` tokens."""
        num, start = int(self.random.integers(1, most + 1)), len(tokens)
        found = [each[start : start + num] for each in self.known if each[:start] == tokens]
        guess = found[0] if found else self.random.integers(0, self.vocab_size, num).tolist()
        return [
            int(self.random.integers(self.vocab_size)) if self.random.random() < self.wrong else i
            for i in guess
        ]

    def end(self, slot: int) -> None:
        del self.tokens[slot]


def draft_in_every_step(patch: pytest.MonkeyPatch) -> None:
    """Let the rows of new engines verify as many draft tokens as they may. Short runs would end in the first pause."""
    patch.setattr(
        "tokenspeed_core.engine.drafting.AdaptiveDepth",
        lambda num_seqs, most, *, is_model: FixedDepth(most),
    )


def make_engine(
    runner: LocalRunner,
    drafter: Drafter | None = None,
    *,
    max_drafts: int = 0,
    num_pages: int | None = None,
    depth: int = 1,
    caching: bool = True,
    draft_depth: DraftDepth | None = None,
    with_prompts: bool = True,
    grammars: Callable[[Scheduler], Grammars] | None = None,
    **limits: Any,
) -> Engine:
    """Return an engine on an empty runner. Without a `drafter`, the draft model of the runner drafts if it may."""
    runner.forget()
    resolved = runner.resolved
    changed = replace(resolved.limits, max_drafts=max_drafts, **limits)
    kv = KVManager(
        resolved.cache_groups,
        runner.block_size,
        num_pages or runner.num_pages,
        blocks_per_page=runner.layout.blocks_per_page,
        max_chunk=changed.max_chunk,
        prefix_caching=caching,
    )
    scheduler = Scheduler(changed, kv, POLICIES["fcfs"])
    if drafter is not None:
        scheduler.use_drafts(
            HostDrafts(
                drafter,
                "guesser",
                draft_depth or FixedDepth(max_drafts),
                changed,
                scheduler.columns,
                scheduler.sequences,
            ),
            with_prompts=with_prompts,
        )
    elif max_drafts and resolved.draft_model is not None:
        scheduler.use_drafts(
            ModelDrafts(draft_depth or FixedDepth(max_drafts), changed, scheduler.columns),
            with_prompts=with_prompts,
        )
    made = None if grammars is None else grammars(scheduler)
    return Engine(scheduler, runner, depth=depth, grammars=made)


def finish(
    engine: Engine,
    requests: Sequence[Submit],
    *,
    aborts: Mapping[int, int] | None = None,
    stop_at: Mapping[int, int] | None = None,
    preempt_every: int = 0,
) -> dict[int, Reply]:
    """Run requests, two of which arrive with each step.

    `aborts` says after which step a sequence is aborted, and `stop_at` after which token, as stop strings do. A sequence
    is preempted after every `preempt_every` steps.
    """
    replies: dict[int, Reply] = defaultdict(Reply)
    waiting, step = list(requests), 0
    num_top = {each.request_id + i: each.logprobs for each in requests for i in range(each.n)}
    while waiting or engine.has_work:
        for submit in waiting[:2]:
            assert engine.submit(submit) is None
        del waiting[:2]
        stopped = []
        for outputs in engine.step():
            for part in outputs.prompts:
                replies[part.sequence_id].add_prompt_logprobs(part)
            for delta in outputs.each():
                reply = replies[delta.sequence_id]
                reply.token_ids += delta.token_ids
                reply.finish = delta.finish
                if (stop_at or {}).get(delta.sequence_id) in delta.token_ids:
                    stopped.append(delta.sequence_id)
                if delta.logprobs is not None:
                    reply.add_logprobs(delta.logprobs, num_top[delta.sequence_id])
        step += 1
        slots = np.flatnonzero(engine.scheduler.columns.sequence_id >= 0)
        if preempt_every and step % preempt_every == 0 and len(slots):
            engine.scheduler.preempt(int(slots[step % len(slots)]))
        engine.abort(stopped + [each for each, when in (aborts or {}).items() if when == step])
    return replies


def random_requests(kinds: Sequence[Submit], num_requests: int) -> list[Submit]:
    """Return requests of random kinds, each for one sequence with a seed."""
    random, made = np.random.default_rng(1), []
    for number in range(num_requests):
        kind = kinds[int(random.integers(len(kinds)))]
        fields = {name: getattr(kind, name) for name in kind.__struct_fields__}
        made.append(Submit(**fields | {"request_id": number, "n": 1, "seed": number}))
    return made


def soak(engine: Engine, requests: Sequence[Submit]) -> list[tuple[Submit, Reply]]:
    """Run `random_requests` with preemptions. A quarter is aborted, and a quarter stops at a token of its prompt.

    All blocks are free in the end, and no request failed.
    """
    random, num_requests = np.random.default_rng(2), len(requests)
    aborts = {
        int(i): int(random.integers(num_requests)) for i in random.permutation(num_requests)[::4]
    }
    stop_at = {i: int(random.choice(requests[i].prompt)) for i in range(0, num_requests, 4)}
    replies = finish(engine, requests, aborts=aborts, stop_at=stop_at, preempt_every=7)
    pool = engine.scheduler.kv.pool
    assert pool.num_available == pool.num_pages
    assert pool.counts().pending == pool.counts().held == 0
    assert engine.scheduler.columns.num_grammars == 0
    assert not engine.take_rejected()
    assert not [each for each, reply in replies.items() if reply.finish == FinishReason.ERROR]
    return [(each, replies[each.request_id]) for each in requests]


def check_starts(found: Sequence[tuple[Submit, Reply]], expected: Mapping[int, Reply]) -> None:
    """Compare the replies of `soak` with those of an engine without drafts, up to the end of each."""
    for submit, reply in found:
        whole = expected[submit.request_id]
        if reply.finish:
            assert (reply.token_ids, reply.finish) == (whole.token_ids, whole.finish)
        num = len(reply.token_ids)
        assert reply.token_ids == whole.token_ids[:num]
        assert np.allclose(reply.values, whole.values[: len(reply.values)], atol=1e-3)
