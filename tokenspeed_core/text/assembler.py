"""Turns the tokens of a sequence into text, and cuts it at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.text.detokenizer import Detokenizer

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


class ReasoningText:
    """Finds the end of the reasoning at the start of a reply, in which stop strings do not count."""

    __slots__ = ("_begin", "_end", "_is_open", "_text", "is_over")

    def __init__(self, begin: str, end: str, is_open: bool) -> None:
        """With `is_open`, the reply starts inside the reasoning. Otherwise it may start with `begin`."""
        self.is_over = not (is_open or begin)
        self._begin = begin
        self._end = end
        self._is_open = is_open
        self._text = ""  # before the reasoning: the reply so far; in it: a possible start of `end`

    def split(self, text: str) -> tuple[str, str]:
        """Return the next text of the reasoning, and the text after it."""
        before = ""
        if not self._is_open:
            self._text += text
            start = self._text.lstrip()
            if not start.startswith(self._begin):
                if self._begin.startswith(start):
                    return "", ""
                self.is_over = True
                return "", self.flush()
            at = len(self._text) - len(start) + len(self._begin)
            before, text = self._text[:at], self._text[at:]
            self._is_open, self._text = True, ""
        known = len(self._text)
        self._text += text
        at = self._text.find(self._end)
        if at < 0:
            self._text = self._text[max(0, len(self._text) - len(self._end) + 1) :]
            return before + text, ""
        self.is_over = True
        at += len(self._end) - known
        return before + text[:at], text[at:]

    def flush(self) -> str:
        """Return the text that `split` has not returned."""
        return "" if self._is_open else self._text


class Assembler:
    """Decodes one sequence and ends it at the first complete stop string.

    Text that may be the start of a stop string is held back. The result does not depend on how the tokens
    are grouped.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_keeps_stop",
        "_min_tokens",
        "_reasoning",
        "_stops",
        "finish_reason",
        "num_chars",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
        reasoning: ReasoningText | None = None,
    ) -> None:
        """`keeps_stop` leaves the stop string, or the text of the stop token, in the text.

        Stop strings in the text of the first `min_tokens` tokens and in the reasoning do not count.
        """
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._min_tokens = min_tokens
        self._reasoning = None if reasoning is None or reasoning.is_over else reasoning
        self._held = ""
        self.num_tokens = 0  # including the one that ended the sequence
        self.num_chars = 0  # decoded characters, including those held back
        # "stop", "length", "abort" or "error"; None while the sequence goes on.
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the stop string that ended the sequence

    def feed(self, token_ids: Sequence[int], finish: int = FinishReason.NOT) -> str:
        """Decode the next tokens and return the text that is final.

        `finish` is the engine's `FinishReason`. If a stop string ends the sequence, `finish_reason` becomes
        "stop" although `finish` is NOT, and the caller must abort the sequence. Later tokens are ignored.
        """
        if self.finish_reason is not None:
            return ""
        shown = (
            self._feed_stops(token_ids, finish)
            if self._stops
            else self._feed_plain(token_ids, finish)
        )
        if finish and self.finish_reason is None:
            self.finish_reason = _REASONS[FinishReason(finish)]
        return shown

    def _feed_plain(self, token_ids: Sequence[int], finish: int) -> str:
        self.num_tokens += len(token_ids)
        if not finish:
            text = self._detokenizer.push(token_ids)
        else:
            visible = (
                token_ids[:-1]
                if finish == FinishReason.STOP and not self._keeps_stop
                else token_ids
            )
            text = self._detokenizer.push(visible) + self._detokenizer.flush()
        self.num_chars += len(text)
        return text

    def _feed_stops(self, token_ids: Sequence[int], finish: int) -> str:
        shown = []
        hidden = len(token_ids) - 1 if finish == FinishReason.STOP and not self._keeps_stop else -1
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if position != hidden:
                shown.append(self._push(self._detokenizer.push((token_id,))))
                if self.finish_reason is not None:
                    return "".join(shown)
        if finish:
            shown.append(self._push(self._detokenizer.flush()))
            if self._reasoning is not None and self.finish_reason is None:
                shown.append(self._match(self._reasoning.flush()))
            shown.append(self._held)
            self._held = ""
        return "".join(shown)

    def _push(self, text: str) -> str:
        """Add text, and return the text that is final."""
        self.num_chars += len(text)
        if self._reasoning is None:
            return self._match(text)
        before, text = self._reasoning.split(text)
        if self._reasoning.is_over:
            self._reasoning = None
        return before + self._match(text)

    def _match(self, text: str) -> str:
        """End the sequence at the first complete stop string, and return the text that is final."""
        if not text:
            return ""
        if self.num_tokens <= self._min_tokens:
            return text
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, self.stop_string = min(found)
            self._held = ""
            self.finish_reason = "stop"
            return text[: end if self._keeps_stop else start]
        keep = min(self._start_of_stop(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    @staticmethod
    def _start_of_stop(text: str, stop: str) -> int:
        """Return the start of the longest suffix of the text that is a prefix of the stop string."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)
