"""The output side of a sequence: tokens in, text that may be shown out, and why it ended."""

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


class Assembler:
    """Follows one sequence from its first token to its end.

    Text that may turn out to be the start of a stop string is held back until it is clear. The result
    does not depend on how the tokens were grouped: the stop string that is complete first ends it.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_keeps_stop",
        "_stops",
        "finish_reason",
        "num_chars",
        "num_tokens",
    )

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), keeps_stop: bool = False
    ) -> None:
        """`keeps_stop`: the stop string, or the text of the stop token, stays in the text."""
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self.num_tokens = 0  # tokens of the sequence, the one that ended it included
        self.num_chars = 0  # characters decoded, held ones included
        self.finish_reason: str | None = (
            None  # "stop", "length", "abort", "error"; None: it goes on
        )

    def feed(self, token_ids: Sequence[int], finish: int = FinishReason.NOT) -> str:
        """Take the next tokens and return the text that may be shown.

        `finish` is the engine's `FinishReason`. When a stop string ends the sequence, `finish_reason` is set
        though `finish` was NOT: the engine must then be told to abort it. Tokens after the end are ignored.
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
                shown.append(self._match(self._detokenizer.push((token_id,))))
                if self.finish_reason is not None:
                    return "".join(shown)
        if finish:
            shown.append(self._match(self._detokenizer.flush()))
            shown.append(self._held)
            self._held = ""
        return "".join(shown)

    def _match(self, text: str) -> str:
        """Add text, end the sequence at the first complete stop string, and return what may be shown."""
        if not text:
            return ""
        self.num_chars += len(text)
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start = min(found)
            self._held = ""
            self.finish_reason = "stop"
            return text[: end if self._keeps_stop else start]
        keep = min(self._start_of_stop(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    @staticmethod
    def _start_of_stop(text: str, stop: str) -> int:
        """Return where the longest tail of the text begins that a stop string begins with."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)
