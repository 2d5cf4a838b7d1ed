"""The base of the parsers: a state machine that reads text and markers, and writes events.

Newlines before a marker belong to the marker. White space after a call belongs to the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tokenspeed_core.api import ReplyEvent
from tokenspeed_parsers.markers import Markers

SPACE = " \t\r\n"
Kind = Literal["content", "reasoning", "call", "arguments"]


class Reader:
    """Parses one reply. A state is a method that takes a piece, and whether it is a marker.

    Text reaches a state in pieces of any size, so a state must not depend on where a piece ends.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._held = ""  # the beginning of a possible marker
        self._events: list[tuple[Kind, list[str], str]] = []
        # The kind of the text that `_write_text` writes.
        self._kind: Literal["content", "reasoning"] = "content"
        self._num_newlines = 0  # newlines not yet written, since a marker may follow
        self._skipped = ""  # the characters to leave out until others follow
        self._state: Callable[[str, bool], None] = self._in_content

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Parse the next delta."""
        if self._held or self._markers.may_be_in(text):
            pieces, self._held = self._markers.split(self._held + text)
            for number, piece in enumerate(pieces):
                if piece:
                    self._state(piece, bool(number % 2))
        else:  # the common case, for each token
            self._state(text, False)
        return self._take_events()

    def finish(self) -> Sequence[ReplyEvent]:
        """Parse the remaining text at the end of the reply."""
        held, self._held = self._held, ""
        if held and not self._is_cut_marker(held):
            self._state(held, False)
        self._end()
        if not self._skipped:
            self._flush_newlines()
        return self._take_events()

    def _in_content(self, piece: str, is_marker: bool) -> None:
        """Read text outside of calls."""
        raise NotImplementedError

    def _end(self) -> None:
        """Write the text that was held back when the reply ends."""

    def _is_cut_marker(self, held: str) -> bool:
        """Return whether the reply was cut within the marker that ends the current state."""
        return False

    def _write_text(self, text: str) -> None:
        """Write content or reasoning, except newlines at its end."""
        if self._skipped:
            text = text.lstrip(self._skipped)
            if not text:
                return
            self._skipped = ""
        body = text.rstrip("\n")
        if body:
            if self._num_newlines:
                self._flush_newlines()
            self._write(self._kind, body)
        self._num_newlines += len(text) - len(body)

    def _flush_newlines(self) -> None:
        self._write(self._kind, self._take_newlines())

    def _take_newlines(self) -> str:
        """Return the newlines that are part of the marker just read."""
        num, self._num_newlines = self._num_newlines, 0
        return "\n" * num

    def _call(self, name: str, call_id: str = "") -> None:
        """Start a call."""
        self._events.append(("call", [name], call_id))

    def _arguments(self, text: str) -> None:
        """Write the next part of the call's arguments."""
        self._write("arguments", text)

    def _end_call(self) -> None:
        """Return to content after a call."""
        self._skipped = SPACE
        self._num_newlines = 0

    def _write(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._events and self._events[-1][0] == kind:
            self._events[-1][1].append(text)
        else:
            self._events.append((kind, [text], ""))

    def _take_events(self) -> Sequence[ReplyEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        if len(events) == 1 and len(events[0][1]) == 1:  # the common case, for each token
            kind, parts, call_id = events[0]
            return (ReplyEvent(kind, parts[0], call_id),)
        return [ReplyEvent(kind, "".join(parts), call_id) for kind, parts, call_id in events]
