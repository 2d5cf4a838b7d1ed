"""The exceptions that TokenSpeed raises. The command line prints each as one line."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches


class TokenSpeedError(Exception):
    """Base class of all errors. The message says what is wrong and what to do."""


class ConfigError(TokenSpeedError):
    """A setting is unknown, out of bounds, without effect, or contradicts another one."""


class PluginError(TokenSpeedError):
    """A plugin is missing, conflicts with another, is incompatible, or fails to load."""


class CheckpointError(TokenSpeedError):
    """A model cannot be found, read or served."""


class SelectionError(TokenSpeedError):
    """No allowed kernel supports an op, or the user's choice of backends or options is invalid. The message says why."""


class CapacityError(TokenSpeedError):
    """Memory or disk space is too small, or a port is in use."""


class RequestFailedError(TokenSpeedError):
    """The engine rejected a request or could not finish it, or a part of the server is unavailable.

    `reason` is "engine_dead", "stopped" (by the user), "unavailable", "internal", or the reason of a `Rejected`
    message.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadRequestError(TokenSpeedError, ValueError):
    """An invalid request. `param` is the invalid field, if it is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class EngineDeadError(TokenSpeedError):
    """The engine ended or cannot continue."""


def printable(text: str) -> str:
    """Escape control characters, since plugins choose names and messages."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text
    )


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception in one line; long messages are cut in the middle."""
    text = "its message cannot be read"
    # Formatting a plugin's exception may raise.
    with suppress(Exception):
        text = " ".join(str(error).split())
    # The message of a SyntaxError has the name of the file without its folder.
    if isinstance(error, SyntaxError) and error.filename:
        text = f"{error.msg} ({error.filename}, line {error.lineno})"
    short = text if len(text) <= 800 else f"{text[:400]} … {text[-400:]}"
    return f"{type(error).__name__}: {short}".removesuffix(": ")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NEAREST?" to end a message about an unknown name, or "" if none is similar."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
