"""The JSON of log-probabilities, written token by token, so that a long answer never holds the GIL for long.

Whole answers with log-probabilities are written in a thread (`generation_response`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from json.encoder import encode_basestring_ascii as quote
from math import isnan, nan

from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import PromptLogprobs, Tokenizer

ITEMS_PER_PIECE = 128
MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


class AnswerLogprobs:
    """The log-probabilities of an answer's tokens, as columns, with any number of alternatives for each token.

    An answer of any length is a few objects. With one object per alternative, the garbage collector would stop all
    threads for a long time while it visits or frees them.
    """

    __slots__ = ("_ends", "_top_ids", "_top_values", "offsets", "token_ids", "values")

    def __init__(self) -> None:
        """Start without tokens."""
        self.token_ids = array("i")
        self.values = array("d")  # NaN for the first token of a prompt, which has none
        self.offsets = array("q")  # of the tokens in the text, in characters
        self._top_ids = array("i")
        self._top_values = array("d")
        self._ends = array("q")  # of the alternatives of each token

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    def append(
        self, token_id: int, value: float, top: Iterable[tuple[int, float]], offset: int
    ) -> None:
        """Add a token with its alternatives, most probable first."""
        self.token_ids.append(token_id)
        self.values.append(value)
        self.offsets.append(offset)
        for other, likely in top:
            self._top_ids.append(other)
            self._top_values.append(max(MIN_LOGPROB, likely))
        self._ends.append(len(self._top_ids))

    def extend(self, others: AnswerLogprobs) -> None:
        """Add the tokens of others."""
        shift = len(self._top_ids)
        self._ends.extend(end + shift for end in others._ends)
        for mine, theirs in (
            (self.token_ids, others.token_ids),
            (self.values, others.values),
            (self.offsets, others.offsets),
            (self._top_ids, others._top_ids),
            (self._top_values, others._top_values),
        ):
            mine.extend(theirs)  # type: ignore[arg-type]

    def tops(self) -> Iterator[list[tuple[int, float]]]:
        """Yield the alternatives of each token: ids and values, most probable first."""
        start = 0
        for end in self._ends:
            yield list(zip(self._top_ids[start:end], self._top_values[start:end], strict=True))
            start = end


@dataclass(slots=True, eq=False)
class ScoredPrompt:
    """A prompt with log-probabilities, which arrive in parts.

    `num_top` is the number of alternatives per token for the field `prompt_logprobs`, None without that field.
    With `is_echoed`, the answer's own log-probabilities start with the prompt's, with `num_echoed_top`
    alternatives.
    """

    token_ids: I32
    num_top: int | None
    is_echoed: bool
    num_echoed_top: int
    skips_special: bool
    parts: list[PromptLogprobs] = field(default_factory=list)

    def rows(self, num_top: int) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
        """Yield value, rank and alternatives of each token after the first."""
        for part in self.parts:
            values, ranks = part.chosen.tolist(), part.ranks.tolist()
            shape = (len(values), part.width)
            top_ids = part.top_ids.reshape(shape)[:, :num_top].tolist()
            top_values = part.top_values.reshape(shape)[:, :num_top].tolist()
            for value, rank, ids, likely in zip(values, ranks, top_ids, top_values, strict=True):
                top = [
                    (token_id, max(MIN_LOGPROB, each))
                    for token_id, each in zip(ids, likely, strict=True)
                ]
                yield max(MIN_LOGPROB, value), rank, top

    def echoed(self, tokenizer: Tokenizer | None) -> AnswerLogprobs:
        """Return the log-probabilities of the echoed prompt; the first has no value."""
        token_ids = self.token_ids.tolist()
        offsets = [0] * len(token_ids)
        if tokenizer is not None:
            detokenizer = tokenizer.detokenizer(skip_special_tokens=self.skips_special)
            length = 0
            for position, token_id in enumerate(token_ids):
                offsets[position] = length
                length += len(detokenizer.push((token_id,)))
        found = AnswerLogprobs()
        found.append(token_ids[0], nan, (), 0)
        rows = self.rows(self.num_echoed_top)
        for token_id, offset, (value, _, top) in zip(token_ids[1:], offsets[1:], rows, strict=True):
            found.append(token_id, value, top, offset)
        return found


class _Fragments(dict[int, str]):
    """JSON that depends on a token only, written once per request."""

    def __init__(self, write: Callable[[int], str]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._write(token_id)
        return text


class LogprobWriter:
    """Writes the log-probabilities of one request. Without a tokenizer, tokens have no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts = _Fragments(lambda token_id: self._piece(token_id).decode(errors="replace"))
        self._names = _Fragments(lambda token_id: quote(self._texts[token_id]))
        self._heads = _Fragments(self._head)

    def completion(self, found: AnswerLogprobs) -> Iterator[str]:
        """Yield the `logprobs` of a completion: four lists with an entry per token."""
        names = self._names
        yield '{"tokens": ['
        yield from _joined(map(names.__getitem__, found.token_ids))
        yield '], "token_logprobs": ['
        yield from _joined(map(_number, found.values))
        yield '], "top_logprobs": ['
        yield from _joined(map(self._top, found.token_ids, found.values, found.tops()))
        yield '], "text_offset": ['
        yield from _joined(map(str, found.offsets))
        yield "]}"

    def chat(self, found: AnswerLogprobs) -> Iterator[str]:
        """Yield the `logprobs` of a chat."""
        yield '{"content": ['
        yield from _joined(map(self._chat_entry, found.token_ids, found.values, found.tops()))
        yield '], "refusal": null}'

    def prompt(self, prompt: ScoredPrompt) -> Iterator[str]:
        """Yield vLLM's `prompt_logprobs`: null, then an object per token, keyed by token ids."""
        yield "["
        yield from _joined(chain(("null",), self._prompt_entries(prompt)))
        yield "]"

    def _chat_entry(self, token_id: int, value: float, top: list[tuple[int, float]]) -> str:
        tops = ", ".join([f"{self._heads[each]}{likely!r}}}" for each, likely in top])
        return f'{self._heads[token_id]}{_number(value)}, "top_logprobs": [{tops}]}}'

    def _prompt_entries(self, prompt: ScoredPrompt) -> Iterator[str]:
        token_ids = prompt.token_ids[1:].tolist()
        rows = prompt.rows(prompt.num_top or 0)
        for token_id, (value, rank, top) in zip(token_ids, rows, strict=True):
            found = {each: (likely, at) for at, (each, likely) in enumerate(top, 1)}
            found[token_id] = (value, rank)
            fields = [
                f'"{each}": {{"logprob": {likely!r}, "rank": {at}, "decoded_token": {self._names[each]}}}'
                for each, (likely, at) in found.items()
            ]
            yield f"{{{', '.join(fields)}}}"

    def _top(self, token_id: int, value: float, top: list[tuple[int, float]]) -> str:
        """Return a map from texts to values. Of tokens with the same text, the most probable counts."""
        if isnan(value):
            return "null"
        found: dict[str, float] = {}
        for other, likely in top:
            found.setdefault(self._names[other], likely)
        found.setdefault(self._names[token_id], value)
        return f"{{{', '.join([f'{name}: {likely!r}' for name, likely in found.items()])}}}"

    def _piece(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _head(self, token_id: int) -> str:
        codes = list(self._piece(token_id))
        return f'{{"token": {self._names[token_id]}, "bytes": {codes}, "logprob": '


def _joined(items: Iterable[str]) -> Iterator[str]:
    """Yield items with commas between them, in pieces of some hundred kilobytes at most."""
    iterator = iter(items)
    separator = ""
    while piece := ", ".join(islice(iterator, ITEMS_PER_PIECE)):
        yield separator + piece
        separator = ", "


def _number(value: float) -> str:
    return "null" if isnan(value) else repr(value)
