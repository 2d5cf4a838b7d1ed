"""Arguments that a format writes as a JSON object between two markers."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed_parsers.json_text import JsonScanner

_FENCE, _FENCE_END = "```json", "```"


class ArgumentsText:
    """Writes the arguments of one call. A code fence around the object is not part of it.

    Text before and after the object is kept in `noise`. Without an object, the text itself is the
    arguments; without any text, they are an empty object.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._scanner: JsonScanner | None = None
        self._around: list[str] = []  # text outside of the object since the last decision
        self.noise = ""

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string of the object."""
        return self._scanner is not None and self._scanner.in_string

    def feed(self, text: str) -> None:
        """Add text."""
        if self._scanner is None:
            before, brace, _ = text.partition("{")
            self._around.append(before)
            if not brace:
                return
            self.noise = _without(_FENCE, "".join(self._around))
            self._around = []
            self._scanner = JsonScanner()
            text = text[len(before) :]
        end = self._scanner.feed(text)
        if end:
            self._write(text[:end])
        self._around.append(text[end:])

    def end(self, *, is_cut: bool = False) -> None:
        """End the arguments. `is_cut`: the reply ended first."""
        text = "".join(self._around).strip()
        if self._scanner is not None:
            self.noise += _without(_FENCE_END, text)
        elif is_cut:
            self._write("" if _FENCE.startswith(text) else text)
        else:
            self._write(text or "{}")


def _without(fence: str, text: str) -> str:
    """Return a text without white space around it, empty if it is the beginning of a fence."""
    text = text.strip()
    return "" if fence.startswith(text) else text
