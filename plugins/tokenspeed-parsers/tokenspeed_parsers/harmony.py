"""The messages of gpt-oss models, in the harmony format.

A message is <|start|>assistant, <|channel|> with the channel's name, <|message|>, text, and <|end|>.
Its header may name a recipient such as to=functions.get_weather: then its text is the arguments of
a call. The channel "analysis" is the reasoning. The prompt ends with the first <|start|>assistant.
"""

from __future__ import annotations

import re

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.arguments_text import ArgumentsText
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.reader import Reader
from tokenspeed_parsers.schema import ToolTypes

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL, RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
_MARKERS = Markers(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_RECIPIENT = r"(?:\s*to=(?P<{}>[\w.:-]+))?"
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant{_RECIPIENT.format('first')}\s*)?"
    rf"<\|channel\|>(?P<channel>analysis|commentary|final){_RECIPIENT.format('second')}"
    r"\s*(?:<\|constrain\|>)?[\w ]*"
)
_BEGINNINGS = tuple(
    f"{start}{CHANNEL}{channel}"
    for start in ("", f"{START}assistant")
    for channel in ("analysis", "commentary", "final")
)
_MAX_HEADER_CHARS = 1024


class Harmony(Reader):
    """Reads headers. Subclasses decide how the text of a message is written."""

    def __init__(self) -> None:
        super().__init__(_MARKERS)
        self._header = ""

    def _in_content(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece in (START, CHANNEL):
            self._header = piece
            self._state = self._in_header
        else:
            self._write_text(piece)

    def _in_header(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece == MESSAGE:
            self._state = self._in_content
            header, self._header = self._header, ""
            match = _HEADER.fullmatch(header)
            if match is None:
                self._write_text(header + piece)
            else:
                recipient = match["second"] or match["first"] or ""
                self._begin(header, match["channel"], recipient)
        elif is_marker and piece in (END, CALL, RETURN):
            self._write_raw()
            self._state(piece, True)
        else:
            self._header += piece
            if len(self._header) > _MAX_HEADER_CHARS:
                self._write_raw()

    def _begin(self, header: str, channel: str, recipient: str) -> None:
        """Begin the text of a message."""
        raise NotImplementedError

    def _write_raw(self) -> None:
        """Write an invalid header as content."""
        header, self._header = self._header, ""
        self._state = self._in_content
        self._write_text(header)

    def _end(self) -> None:
        if self._state == self._in_header:
            self._write_raw()


class HarmonyReasoning(Harmony):
    """Finds the reasoning. Messages with a recipient stay content, unchanged."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__()

    def _begin(self, header: str, channel: str, recipient: str) -> None:
        if recipient:
            self._write_text(header + MESSAGE)
            self._state = self._in_call
        else:
            self._kind = "reasoning" if channel == "analysis" else "content"
            self._state = self._in_message

    def _in_message(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece in (END, RETURN, CALL, START, CHANNEL):
            self._flush_newlines()
            self._kind = "content"
            self._state = self._in_content
            if piece in (START, CHANNEL):
                self._state(piece, True)
        else:
            self._write_text(piece)

    def _in_call(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece in (START, CHANNEL):
            self._state = self._in_content
            self._state(piece, True)
            return
        self._write_text(piece)
        if is_marker and piece in (END, CALL, RETURN):
            self._state = self._in_content

    def _end(self) -> None:
        is_beginning = any(each.startswith(self._header + self._held) for each in _BEGINNINGS)
        if self._state == self._in_header and is_beginning:
            self._header = ""
        super()._end()


class HarmonyCalls(Harmony):
    """Finds the calls. All other messages stay content, with their headers."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__()
        self._names = ToolTypes(context.tools).names
        self._text = ArgumentsText(self._arguments)

    def _begin(self, header: str, channel: str, recipient: str) -> None:
        name = recipient.removeprefix("functions.")
        if name != recipient or name in self._names:
            self._take_newlines()
            self._call(name)
            self._text = ArgumentsText(self._arguments)
            self._state = self._in_call
        else:
            self._write_text(header + MESSAGE)

    def _in_call(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece in (END, CALL, RETURN, START, CHANNEL):
            self._leave_call()
            if piece in (START, CHANNEL):
                self._state(piece, True)
        else:
            self._text.feed(piece)

    def _leave_call(self, *, is_cut: bool = False) -> None:
        self._text.end(is_cut=is_cut)
        self._end_call()
        self._state = self._in_content
        self._write_text(self._text.noise)

    def _end(self) -> None:
        if self._state == self._in_call:
            self._leave_call(is_cut=True)
        super()._end()

    def _is_cut_marker(self, held: str) -> bool:
        return self._state == self._in_call
