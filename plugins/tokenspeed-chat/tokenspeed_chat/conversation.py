"""A conversation: its messages, its commands, and the loop that reads turns from a terminal."""

from __future__ import annotations

import time
from typing import Any

from tokenspeed_chat.client import ChatClient, Delta, ServerError, Usage
from tokenspeed_chat.screen import Screen

HELP = """\
/help          show this list
/system TEXT   set the system message; without TEXT, remove it
/clear         forget the conversation
/exit          leave; Ctrl-D does the same
\"\"\"            begin and end a message of several lines
\\              at the end of a line: the message continues
Ctrl-C         stop an answer"""


class Conversation:
    """The messages so far, and the server that answers."""

    def __init__(
        self, client: ChatClient, model: str, system: str | None, options: dict[str, Any]
    ) -> None:
        self.client = client
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []  # without the system message
        self._options = options

    def answer(self, question: str, screen: Screen) -> None:
        """Print the answer as it comes, and add both to the messages.

        Ctrl-C stops the answer and keeps its text. Raises ServerError; the messages are then
        unchanged.
        """
        self.messages.append({"role": "user", "content": question})
        system = [{"role": "system", "content": self.system}] if self.system else []
        text: list[str] = []
        statistics = Statistics()
        is_stopped = False
        try:
            for part in self.client.stream(self.model, system + self.messages, self._options):
                match part:
                    case Usage():
                        statistics.usage = part
                    case Delta():
                        statistics.note_text()
                        screen.show(part)
                        if not part.is_reasoning:
                            text.append(part.text)
        except KeyboardInterrupt:
            if not screen.is_interactive:
                raise
            is_stopped = True
        except ServerError:
            self.messages.pop()
            raise
        finally:
            screen.end_answer()
        self.messages.append({"role": "assistant", "content": "".join(text)})
        screen.note("stopped" if is_stopped else statistics.summary())

    def run_command(self, line: str, screen: Screen) -> bool:
        """Run a line that starts with "/". Return whether the conversation continues."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                screen.note(HELP)
            case "/system":
                self.system = rest.strip() or None
                screen.note("system message set" if self.system else "system message removed")
            case "/clear":
                self.messages.clear()
                screen.note("conversation forgotten")
            case "/exit" | "/quit":
                return False
            case _:
                screen.note(f"unknown command {name}; /help lists the commands")
        return True


class Statistics:
    """Times of one answer."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._started_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = self._started_at

    def note_text(self) -> None:
        """Record that text arrived now."""
        self._last_at = time.monotonic()
        if self._first_at is None:
            self._first_at = self._last_at

    def summary(self) -> str:
        """Return one line; without a usage from the server, the time alone."""
        if self._first_at is None:
            return "no text"
        first = f"first token after {self._first_at - self._started_at:.2f} s"
        if self.usage is None:
            return first
        tokens, seconds = self.usage.completion_tokens, self._last_at - self._first_at
        rate = f"{(tokens - 1) / seconds:.0f} tokens/s, " if tokens > 1 and seconds > 0 else ""
        prompt = f"{self.usage.prompt_tokens} prompt tokens"
        if self.usage.cached_tokens:
            prompt += f" ({self.usage.cached_tokens} cached)"
        return f"{prompt}, {tokens} tokens, {rate}{first}"


def converse(conversation: Conversation, screen: Screen) -> int:
    """Read turns and print answers until Ctrl-D; return the exit status."""
    where = conversation.client.base_url
    screen.note(f"{conversation.model} at {where}. /help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            text = screen.read()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            screen.note("Ctrl-D leaves.")
            continue
        if not text.strip():
            continue
        if text.startswith("/"):
            if not conversation.run_command(text.strip(), screen):
                return 0
            continue
        try:
            conversation.answer(text, screen)
        except ServerError as error:
            screen.note(f"tokenspeed: {error}")
