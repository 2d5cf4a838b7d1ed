"""Answers to the demo's score set do not depend on the drafter. `tests/gpu` runs the whole set."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from score_answers import DRAFTERS, answers

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

NUM_ITEMS = 100  # of each task


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[list[int]]]:
    """Return a function from a model to its answers without a drafter."""

    @cache
    def of(model: str) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            return answers(model, NUM_ITEMS, patch, device="cpu", max_num_seqs=64)[0]

    return of


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_drafter_changes_no_answer(
    drafter: str, expected: Callable[[str], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = DRAFTERS[drafter]
    found, stats = answers(
        model,
        NUM_ITEMS,
        monkeypatch,
        device="cpu",
        max_num_seqs=64,
        speculative_config=config,
    )
    assert found == expected(model)
    assert stats.num_saved_steps > 0.1 * stats.num_draft_rows
    assert (stats.num_held_pages, stats.num_pending_pages) == (0, 0)
