"""The arrays of a drafter on the host."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import MODEL, World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.drafters import Drafts
from tokenspeed_core.api.step import I32, StepPlan


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_plans_keep_their_draft_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: type[np.integer]
) -> None:
    """The drafter returns the same buffer in each call."""
    world = World(num_drafts=3)
    propose, forward = world.drafter.propose, world.engine.runner.forward
    counts_buffer, ids_buffer = np.zeros(6, np.int32), np.zeros(18, dtype)
    planned: list[tuple[I32, list[int]]] = []

    def propose_in_buffer(slots: I32, max_drafts: I32) -> Drafts:
        drafts = propose(slots, max_drafts)
        counts = counts_buffer[: len(drafts.counts)]
        token_ids = ids_buffer[: len(drafts.token_ids)]
        counts[:], token_ids[:] = drafts.counts, drafts.token_ids
        return Drafts(counts, token_ids)

    def note_forward(plan: StepPlan) -> None:
        if plan.draft_token_ids is not None:
            planned.append((plan.draft_token_ids, plan.draft_token_ids.tolist()))
        forward(plan)

    monkeypatch.setattr(world.drafter, "propose", propose_in_buffer)
    monkeypatch.setattr(world.engine.runner, "forward", note_forward)
    for i in range(3):
        prompt = np.random.default_rng(i).integers(0, MODEL.vocab_size, 5).tolist()
        world.submit(request(i, prompt, max_tokens=40))
    world.run()
    assert len(planned) > 5
    assert {token_ids.dtype for token_ids, _ in planned} == {np.dtype(np.int32)}
    assert all(token_ids.tolist() == expected for token_ids, expected in planned)
    for sequence_id, tokens in world.tokens.items():
        prompt = np.asarray(world.requests[sequence_id].prompt).tolist()
        assert tokens == world.model.expected(prompt, len(tokens))
