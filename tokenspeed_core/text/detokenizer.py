"""Incremental decoding: returned text never changes and never ends inside a character."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Kind(IntEnum):
    """The kind of a token id."""

    TEXT = 0
    BYTE = 1  # one byte of a character that is not in the vocabulary
    NOTHING = 2  # an unknown id, or a special token that is omitted


class Detokenizer(Protocol):
    """Decodes one sequence. The joined deltas equal the text of all tokens decoded at once."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the text that was held back. Called last."""


class ByteDetokenizer:
    """Decodes byte-level vocabularies, where every token is a string of UTF-8 bytes.

    `pieces` maps a token id to its bytes, `texts` to its text, or None if its bytes are not whole
    characters. All sequences of a tokenizer share both.
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
        """Return a replacement character if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


def without_text() -> Detokenizer:
    """Return a detokenizer for engines without a tokenizer: tokens have no text."""
    return ByteDetokenizer(defaultdict(bytes), defaultdict(str))


@dataclass(slots=True, eq=False)
class WindowDetokenizer:
    """Decodes any other vocabulary: new tokens together with a window of earlier ones.

    The text of a token depends on the tokens before it (a space before a word, but none at the start).
    Byte tokens are held back until their run ends, since one bad byte changes the text of the whole run.

    `alone` maps a token id to its text on its own; all sequences share it. `waits_for_bytes` holds back text
    that ends in a replacement character, which later tokens may complete.
    """

    decode: Callable[[list[int]], str]
    alone: Mapping[int, str]
    kinds: Mapping[int, Kind]
    waits_for_bytes: bool
    _window: list[int] = field(default_factory=list)
    _num_given: int = 0  # tokens of the window with returned text
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
        """Return the text that was held back."""
        return self.decode(self._window)[len(self._prefix) :]
