"""The terminal: the user's input, answers on stdout, and everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tokenspeed_chat.client import Delta

QUOTES = '"""'


class Screen:
    """Answers go to stdout. Reasoning, statistics and progress go to a terminal only, dimmed."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._shows_notes = sys.stderr.isatty() or self.is_interactive
        self._has_color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._is_in_reasoning = False
        self._is_at_line_start = True

    def show(self, part: Delta) -> None:
        """Print a piece of an answer."""
        if part.is_reasoning:
            if self._shows_notes:
                self._is_in_reasoning = True
                self._write_dimmed(part.text)
            return
        if self._is_in_reasoning:
            self._is_in_reasoning = False
            self._write_dimmed("\n\n")
        sys.stdout.write(part.text)
        sys.stdout.flush()
        self._is_at_line_start = part.text.endswith("\n")

    def end_answer(self) -> None:
        """End the line of an answer, or of reasoning that was cut."""
        if self._is_in_reasoning:
            self._is_in_reasoning = False
            self._write_dimmed("\n")
        elif not self._is_at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._is_at_line_start = True

    def note(self, text: str) -> None:
        """Print a line that is not part of an answer; nothing if the output is not a terminal."""
        if self._shows_notes:
            self._write_dimmed(text + "\n")

    def read(self) -> str:
        """Return the user's input: a line, continued lines, or lines between triple quotes.

        Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C.
        """
        import readline  # noqa: F401  # adds history and editing to input()

        line = input("> ")
        if line.startswith(QUOTES):
            return _until_quotes(line.removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(". "))
        return "\n".join(lines)

    @contextmanager
    def progress(self, text: str) -> Iterator[Progress]:
        """Show a line that changes until the block ends."""
        progress = Progress(self._has_color)
        progress.update(text)
        try:
            yield progress
        finally:
            progress.clear()

    def _write_dimmed(self, text: str) -> None:
        sys.stderr.write(typer.style(text, dim=True) if self._has_color else text)
        sys.stderr.flush()


class Progress:
    """One line of a terminal. Without a terminal, only its first text is printed."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._is_begun = False

    def update(self, text: str) -> None:
        """Replace the line."""
        if self._is_terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._write("\r\x1b[2K" + typer.style(text[: width - 1], dim=True))
        elif not self._is_begun:
            self._write(text + "\n")
        self._is_begun = True

    def clear(self) -> None:
        """Remove the line."""
        if self._is_terminal:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _until_quotes(first: str) -> str:
    """Return the lines up to the closing triple quotes."""
    lines = [first]
    while QUOTES not in lines[-1]:
        lines.append(input(". "))
    lines[-1] = lines[-1].partition(QUOTES)[0]
    return "\n".join(lines).strip("\n")
