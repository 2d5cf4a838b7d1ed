"""The index of earlier occurrences: equal to a search of the text, and bounded in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_drafters import match_index
from tokenspeed_drafters.match_index import MAX_CONTEXT, ORDERS, Matches, MatchIndex

HASH = match_index._all_hashes
TEXTS = st.lists(st.integers(0, 3), max_size=60)


def as_array(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def matches(text: list[int], context: list[int], oldest: int = 0) -> Matches:
    """Return the matches of the highest order, by comparing every position."""
    found = []  # positions and lengths, the newest first
    for end in range(len(text) - 1, oldest, -1):
        length = 0
        while (
            length < min(len(context), MAX_CONTEXT, end - oldest)
            and text[end - 1 - length] == context[-1 - length]
        ):
            length += 1
        found.append((end, length))
    for order in ORDERS:
        long = [each for each in found if each[1] >= order]
        if long:
            return Matches([position for position, _ in long], long[0][1])
    return Matches([], 0)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_index, "MAX_VISITED", 10**6)
    monkeypatch.setattr(match_index, "MAX_OCCURRENCES", 10**6)


@pytest.mark.usefixtures("unlimited")
@settings(max_examples=150)
@given(first=TEXTS, rest=TEXTS)
def test_search_equals_a_scan_of_the_text(first: list[int], rest: list[int]) -> None:
    index = MatchIndex(256)
    index.append_all(as_array(first))
    for start in range(0, len(rest), 3):
        index.extend(rest[start : start + 3])
        text = first + rest[: start + 3]
        context = index.context()
        assert context.token_ids == text[-MAX_CONTEXT:]
        expected = matches(text, context.token_ids)
        assert index.find(context) == expected


@pytest.mark.usefixtures("unlimited")
@settings(max_examples=100)
@given(texts=st.lists(TEXTS, max_size=4), context=TEXTS.filter(bool))
def test_search_in_other_texts_never_crosses_their_ends(
    texts: list[list[int]], context: list[int]
) -> None:
    index, joined = MatchIndex(256), []
    for text in texts:
        index.append_all(as_array([*text, -1]))
        joined += [*text, -1]
    request = MatchIndex(256)
    request.append_all(as_array(context))
    last = request.context()
    expected = matches(joined, last.token_ids)
    assert index.find(last) == expected


@pytest.mark.usefixtures("unlimited")
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    is_bulk=st.booleans(),
)
def test_only_the_newest_tokens_are_kept(seed: int, sizes: list[int], is_bulk: bool) -> None:
    random = np.random.default_rng(seed)
    index, text = MatchIndex(512), []
    for size in sizes:
        part = random.integers(0, 40, size).astype(np.int32)
        if is_bulk:
            index.append_all(part)
        else:
            index.extend(part.tolist())
        text += part.tolist()
    kept = text[-512:]
    assert index.capacity <= 512
    assert index.last(600) == (kept if len(text) >= index.capacity else text)
    if is_bulk and len(sizes) > 1:
        return  # contexts begin at each text
    context = index.context()
    found = index.find(context)
    shift = index.num_tokens - len(
        text
    )  # a text beyond the capacity was shortened before it was added
    expected = matches(text, context.token_ids, index.oldest - shift)
    assert [each - shift for each in found.positions] == expected.positions
    assert found.length == expected.length


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("size", [100, 1000])
def test_growing_index_keeps_its_chains(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index, text, num_chained = MatchIndex(8192), [], []
    monkeypatch.setattr(
        match_index, "_all_hashes", lambda ids: num_chained.append(len(ids)) or HASH(ids)
    )
    for part in np.random.default_rng(size).integers(0, 40, (5000 // size, size), np.int32):
        index.extend(part.tolist())
        text += part.tolist()
        context = index.context()
        assert index.find(context) == matches(text, context.token_ids)
    assert sum(num_chained) < 1.2 * len(text), "no token is chained again"


def test_search_visits_a_bounded_number_of_occurrences() -> None:
    index = MatchIndex(4096)
    index.append_all(np.zeros(4000, np.int32))
    found = index.find(index.context())
    last = 3999
    assert found.positions == list(range(last, last - match_index.MAX_OCCURRENCES, -1))


def test_continuation_of_a_repeated_text_repeats_it() -> None:
    index = MatchIndex(256)
    index.append_all(as_array([1, 2, 3]))
    assert index.continuation(1, 7) == [2, 3, 2, 3, 2, 3, 2]
    assert index.continuation(3, 4) == []


@pytest.mark.parametrize("max_tokens", [0, 128, 1000])
def test_capacity_must_be_a_power_of_two(max_tokens: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        MatchIndex(max_tokens)
