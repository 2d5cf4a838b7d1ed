"""Stop strings end a sequence at the same character however its tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.text.assembler import Assembler, ReasoningText


class Letters:
    """A detokenizer with one token per character of a small alphabet."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join("abc"[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return ""


class Characters:
    """A detokenizer whose tokens are characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


def run(
    ids: list[int], bounds: list[int], stops: list[str], keeps: bool, num_min: int = 0
) -> tuple[str, Assembler, list[str]]:
    assembler = Assembler(Letters(), stops, keeps, num_min)
    shown = []
    for start, end in itertools.pairwise(bounds):
        shown.append(
            assembler.feed(
                ids[start:end], FinishReason.LENGTH if end == len(ids) else FinishReason.NOT
            )
        )
        if assembler.finish_reason is not None:
            break
    return "".join(shown), assembler, shown


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4)),
    keeps=st.booleans(),
    num_min=st.sampled_from((0, 0, 3)),
    data=st.data(),
)
def test_first_complete_stop_string_ends_the_text(
    ids: list[int], stops: list[str], keeps: bool, num_min: int, data: st.DataObject
) -> None:
    text = "".join("abc"[i] for i in ids)
    ends = [
        (text.find(s, num_min) + len(s), text.find(s, num_min))
        for s in stops
        if s in text[num_min:]
    ]
    end, start = min(ends, default=(len(text), len(text)))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=5)) - {len(ids)})
    got, assembler, _ = run(ids, [0, *cuts, len(ids)], stops, keeps, num_min)
    assert got == text[: end if keeps else start]
    assert assembler.finish_reason == ("stop" if ends else "length")
    assert assembler.stop_string == (text[start:end] if ends else None)
    assert assembler.num_tokens == end


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab <", max_size=6).flatmap(
        lambda end: st.sampled_from(["", " ", "<t>", "\n<t>", "<"]).map(lambda start: start + end)
    ),
    more=st.text("ab</t>", max_size=12),
    answer=st.text("ab</t> ", max_size=8),
    is_closed=st.booleans(),
    is_open=st.booleans(),
    begin=st.sampled_from(["<t>", ""]),
    stops=st.lists(st.text("ab<t>/ ", min_size=1, max_size=3), min_size=1, max_size=3),
    data=st.data(),
)
def test_stop_strings_do_not_count_in_the_reasoning(
    text: str,
    more: str,
    answer: str,
    is_closed: bool,
    is_open: bool,
    begin: str,
    stops: list[str],
    data: st.DataObject,
) -> None:
    text += more + ("</t>" if is_closed else "") + answer
    after = 0
    is_reasoning = is_open or (begin and text.lstrip().startswith(begin))
    if is_reasoning:
        at = text.find("</t>", 0 if is_open else text.index(begin) + len(begin))
        after = len(text) if at < 0 else at + len("</t>")
    ends = [
        (text.find(stop, after) + len(stop), text.find(stop, after))
        for stop in stops
        if stop in text[after:]
    ]
    _, start = min(ends, default=(len(text), len(text)))
    assembler = Assembler(Characters(), stops, reasoning=ReasoningText(begin, "</t>", is_open))
    ids = [ord(character) for character in text]
    cut = data.draw(st.integers(0, len(ids)))
    got = assembler.feed(ids[:cut]) + assembler.feed(ids[cut:], FinishReason.LENGTH)
    assert got == text[:start]
    assert assembler.finish_reason == ("stop" if ends else "length")


def test_possible_stop_string_is_held_back() -> None:
    _, assembler, shown = run([0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5], ["abb"], keeps=False)
    assert shown == ["", "", "ab", "", "abc"]
    assert assembler.finish_reason == "length"


def test_stop_token_has_no_text_by_default() -> None:
    hidden, kept = Assembler(Letters()), Assembler(Letters(), keeps_stop=True)
    assert hidden.feed([0, 1], FinishReason.STOP) == "a"
    assert kept.feed([0, 1], FinishReason.STOP) == "ab"
    assert hidden.num_tokens == kept.num_tokens == 2


def test_tokens_after_the_end_are_ignored() -> None:
    assembler = Assembler(Letters(), ["b"])
    assert assembler.feed([0, 1, 2]) == "a"
    assert assembler.feed([2, 2], FinishReason.LENGTH) == ""
    assert (assembler.finish_reason, assembler.num_tokens) == ("stop", 2)
