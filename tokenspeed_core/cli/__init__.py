"""The command `tokenspeed`."""

from tokenspeed_core.cli.app import main

__all__ = ["main"]
