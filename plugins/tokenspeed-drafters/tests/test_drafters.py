"""The drafters ngram and suffix: their proposals, and the tokens that they keep."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_drafters import NGRAM, SUFFIX
from tokenspeed_drafters.match_index import BYTES_PER_TOKEN, MatchIndex
from tokenspeed_drafters.models import plan_mtp
from tokenspeed_drafters.ngram import find_ngram
from tokenspeed_drafters.suffix import SuffixDrafter, Tenants

from tokenspeed_core.api.drafters import DraftCheckpoint, Drafter, DrafterContext, DraftRequest
from tokenspeed_core.api.models import ANY_ARCHITECTURE, ModelSpec


def test_mtp_names_the_architecture_without_a_family() -> None:
    config = {"architectures": ["OddForCausalLM"]}
    target = DraftCheckpoint(Path(), config, ModelSpec(ANY_ARCHITECTURE, "a:b", "a:b"), None)
    with pytest.raises(ValueError, match="multi-token prediction of OddForCausalLM"):
        plan_mtp(DraftRequest(target, None, {}))


def as_array(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, np.int32)


def context(**options: object) -> DrafterContext:
    return DrafterContext(
        vocab_size=100, num_slots=4, max_model_len=4096, max_drafts=16, options=options
    )


def propose(drafter: Drafter, slot: int, limit: int = 8) -> list[int]:
    return drafter.propose(as_array(slot), as_array(limit)).token_ids.tolist()


def newest_ngram(tokens: list[int], longest: int, shortest: int) -> int:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return 0


@settings(max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 6),
)
def test_ngram_is_the_newest_occurrence_of_the_longest_suffix(
    tokens: list[int], longest: int, shortest: int
) -> None:
    expected = newest_ngram(tokens, longest, shortest)
    assert find_ngram(as_array(*tokens), longest, shortest) == expected


@pytest.mark.parametrize("spec", [NGRAM, SUFFIX])
def test_drafter_continues_a_copied_text(spec: object) -> None:
    drafter = spec.make(context())
    drafter.begin(2, as_array(*range(10, 40), 12, 13), 31, "")
    assert propose(drafter, 2) == list(range(14, 22))
    drafter.extend(as_array(2), as_array(9), as_array(*range(14, 23)))
    assert propose(drafter, 2, 3) == [23, 24, 25]
    drafter.end(2)


@pytest.mark.parametrize("spec", [NGRAM, SUFFIX])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_drafts_stay_within_their_limits(spec: object, data: st.DataObject) -> None:
    drafter = spec.make(context())
    slots = data.draw(st.permutations(range(4)))
    tokens = st.integers(0, 9)
    for slot in slots:
        prompt = data.draw(st.lists(tokens, min_size=1, max_size=20))
        drafter.begin(slot, as_array(*prompt), len(prompt), str(slot % 2))
    for _ in range(data.draw(st.integers(1, 4))):
        limits = data.draw(st.lists(st.integers(1, 16), min_size=4, max_size=4))
        drafts = drafter.propose(as_array(*slots), as_array(*limits))
        assert (drafts.counts <= limits).all() and (drafts.counts >= 0).all()
        assert drafts.counts.sum() == len(drafts.token_ids)
        assert ((drafts.token_ids >= 0) & (drafts.token_ids < 10)).all()
        if drafts.probabilities is not None:
            assert ((drafts.probabilities > 0) & (drafts.probabilities <= 1)).all()
        new = [data.draw(st.lists(tokens, min_size=1, max_size=5)) for _ in slots]
        drafter.extend(as_array(*slots), as_array(*map(len, new)), as_array(*chain(*new)))
    for slot in slots:
        drafter.end(slot)


def finish(drafter: Drafter, tenant: str, prompt: list[int], answer: list[int]) -> None:
    drafter.begin(0, as_array(*prompt, answer[0]), len(prompt), tenant)
    drafter.extend(as_array(0), as_array(len(answer) - 1), as_array(*answer[1:]))
    drafter.end(0)


def test_suffix_uses_earlier_answers_of_the_same_key() -> None:
    drafter = SuffixDrafter(context())
    for _ in range(3):
        finish(drafter, "one", [1, 2, 3], list(range(50, 70)))
    for tenant, expected in (("one", [52, 53, 54]), ("two", []), ("", [])):
        drafter.begin(1, as_array(7, 8, 50, 51), 2, tenant)
        assert propose(drafter, 1, 3) == expected
        drafter.end(1)


def test_suffix_drafts_from_the_end_of_the_prompt() -> None:
    drafter = SuffixDrafter(context())
    finish(drafter, "", [1, 2, 3, 4, 5], [60, 61, 62])
    drafter.begin(0, as_array(9, 3, 4, 5), 4, "")
    assert propose(drafter, 0, 2) == [60, 61]


def test_suffix_follows_the_source_again_after_a_replaced_token() -> None:
    drafter = SuffixDrafter(context())
    source = [*range(10, 30)]
    drafter.begin(0, as_array(*source, 1, 10), 21, "")
    assert propose(drafter, 0, 4) == [11, 12, 13, 14]
    drafter.extend(as_array(0), as_array(2), as_array(11, 99))  # 99 replaces 12
    assert propose(drafter, 0, 3)[:1] == [13]
    drafter.extend(as_array(0), as_array(1), as_array(17))  # 13 to 16 were deleted
    assert propose(drafter, 0, 3) == [18, 19, 20]


def test_suffix_prefers_a_longer_match_to_one_after_a_replaced_token() -> None:
    drafter = SuffixDrafter(context())
    prompt = [*range(10, 15), 60, 70, 71, *range(15, 20), 51, 60, 61, 62, 1]
    drafter.begin(0, as_array(*prompt, 10), len(prompt), "")
    assert propose(drafter, 0, 2) == [11, 12]
    drafter.extend(as_array(0), as_array(2), as_array(51, 60))
    assert propose(drafter, 0, 2) == [61, 62]


def test_wrong_drafts_lower_the_estimates() -> None:
    drafter = SuffixDrafter(context())
    random = np.random.default_rng(0)
    drafter.begin(0, random.integers(0, 3, 64).astype(np.int32), 64, "")

    def estimate() -> float:
        drafts = drafter.propose(as_array(0), as_array(1))
        return 0.0 if drafts.probabilities is None else float(drafts.probabilities.sum())

    first = estimate()
    for _ in range(300):
        drafter.extend(as_array(0), as_array(1), random.integers(0, 3, 1).astype(np.int32))
        last = estimate()
    assert last < first


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 900)), min_size=1, max_size=30),
)
def test_earlier_answers_take_bounded_memory(sizes: list[tuple[int, int]]) -> None:
    tenants = Tenants(1024, 2048)
    for tenant, size in sizes:
        tenants.add(str(tenant), np.zeros(size, np.int32))
        assert tenants.num_bytes <= (2048 + 256) * BYTES_PER_TOKEN
        indexes = [answers.index for answers in tenants._answers.values()]
        assert tenants.num_bytes == sum(index.capacity for index in indexes) * BYTES_PER_TOKEN


def test_an_answer_looks_at_few_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants, num_calls = Tenants(1024, 2**20), 0
    for number in range(200):
        tenants.add(str(number), np.zeros(8, np.int32))
    capacity = MatchIndex.capacity.fget
    assert capacity is not None

    def counting(index: MatchIndex) -> int:
        nonlocal num_calls
        num_calls += 1
        return int(capacity(index))

    monkeypatch.setattr(MatchIndex, "capacity", property(counting))
    tenants.add("0", np.zeros(8, np.int32))
    assert 0 < num_calls < 10


@pytest.mark.parametrize(
    ("spec", "options", "name"),
    [
        (NGRAM, {"prompt_lookup_max": 0}, "prompt_lookup_max"),
        (NGRAM, {"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min"),
        (NGRAM, {"window": 3}, "window"),
        (SUFFIX, {"suffix_answers": True}, "suffix_answers"),
        (SUFFIX, {"suffix_answers": 512, "suffix_answers_per_key": 1024}, "suffix_answers_per_key"),
    ],
)
def test_wrong_options_are_refused(spec: object, options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        spec.check_options(options)
