"""The exceptions that TokenSpeed raises on purpose; the command line prints each as one line."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches


class TokenSpeedError(Exception):
    """Anything that TokenSpeed refuses or cannot do; the message says what to do about it."""


class ConfigError(TokenSpeedError):
    """A setting that does not exist, is out of bounds, or contradicts another one."""


class PluginError(TokenSpeedError):
    """A plugin that is missing, clashes with another, does not fit this core, or fails to load."""


class CheckpointError(TokenSpeedError):
    """A model that cannot be found, read or served."""


class SelectionError(TokenSpeedError):
    """A backend or kernel that was asked for and cannot do the work, with all the reasons."""


class CapacityError(TokenSpeedError):
    """Memory, disk or a port that is too small or taken."""


class RequestFailedError(TokenSpeedError):
    """A request that the engine rejected or could not finish.

    `reason` is "queue_full", "too_long", "engine_dead", "internal" or another reason of a `Rejected` message.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineDeadError(TokenSpeedError):
    """An engine process that ended or stopped stepping while it was needed."""


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal: names and reasons are as plugins wrote them."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text
    )


def describe_error(error: BaseException) -> str:
    """Return any exception in one line, its type and its whole message, of a very long one without the middle."""
    text = "its message cannot be read"
    with suppress(Exception):  # a plugin's own exception may raise when it is printed
        text = " ".join(str(error).split())
    if (
        isinstance(error, SyntaxError) and error.filename
    ):  # by itself it tells the file without its folder
        text = f"{error.msg} ({error.filename}, line {error.lineno})"
    short = text if len(text) <= 800 else f"{text[:400]} … {text[-400:]}"
    return f"{type(error).__name__}: {short}".removesuffix(": ")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, "; did you mean NEAREST?"; "" where none is near."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
