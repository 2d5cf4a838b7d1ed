"""Tokens to text, a few at a time: what was given out never changes and never ends inside a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Kind(IntEnum):
    """What a token id is to a detokenizer."""

    TEXT = 0
    BYTE = 1  # one byte of a character that the vocabulary lacks
    NOTHING = 2  # no token, or a special one that is left out


class Detokenizer(Protocol):
    """Decodes one sequence. The deltas, joined, are what decoding all tokens at once gives."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return what is still held back; nothing may be pushed after it."""


class ByteDetokenizer:
    """For byte-level vocabularies: every token is bytes, the text is their UTF-8.

    `pieces` maps a token id to its bytes, `texts` to its text where its bytes are whole characters;
    both fill themselves as ids are met, and are shared by all sequences of a tokenizer.
    """

    __slots__ = ("_decoder", "_is_inside", "_pieces", "_texts")

    def __init__(self, pieces: Mapping[int, bytes], texts: Mapping[int, str | None]) -> None:
        self._pieces = pieces
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # the bytes so far end inside a character

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if not self._is_inside and len(token_ids) == 1:
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        text = self._decoder.decode(b"".join([self._pieces[token_id] for token_id in token_ids]))
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return a replacement character for a character that was cut, else nothing."""
        return self._decoder.decode(b"", final=True)


@dataclass(slots=True, eq=False)
class WindowDetokenizer:
    """For any other vocabulary: decodes the new tokens together with those given out last.

    Text depends on its neighbours to the left (a space before a word, none at the start), so a window of
    tokens that were given out stays in front. Bytes that stand for a character are held until the run of
    them ends, since one bad byte changes how the whole run reads.

    `alone` is what `decode` gives for one token, remembered by all sequences. `waits_for_bytes`: text that ends in a
    replacement character may yet become another one.
    """

    decode: Callable[[list[int]], str]
    alone: Mapping[int, str]
    kinds: Mapping[int, Kind]
    waits_for_bytes: bool
    _window: list[int] = field(default_factory=list)
    _num_given: int = 0  # tokens of the window whose text was given out
    _prefix: str = ""  # their text

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        kinds = self.kinds
        fresh = [token_id for token_id in token_ids if kinds[token_id] is not Kind.NOTHING]
        if not fresh:
            return ""
        self._window += fresh
        if kinds[fresh[-1]] is Kind.BYTE:
            return ""
        text = self.decode(self._window)[len(self._prefix) :]
        if not text or (self.waits_for_bytes and text.endswith(REPLACEMENT)):
            return ""
        del self._window[: self._num_given]
        self._num_given = len(self._window)
        self._prefix = self.alone[fresh[0]] if self._num_given == 1 else self.decode(self._window)
        return text

    def flush(self) -> str:
        """Return the text of all tokens still held."""
        return self.decode(self._window)[len(self._prefix) :]
