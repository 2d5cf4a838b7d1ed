"""The command `tokenspeed`: one module per command, imported when it is asked for."""

from tokenspeed_core.cli.app import main

__all__ = ["main"]
