"""Errors of `tokenspeed bench`."""

from __future__ import annotations

from tokenspeed_core import TokenSpeedError

INTERRUPTED = 130  # the exit status after a Ctrl-C


class BenchError(TokenSpeedError):
    """A measurement that cannot run, or results that cannot be compared."""
