"""One frozen configuration, and the places that its values come from."""

from tokenspeed_core.config.schema import C, Config

__all__ = ["C", "Config"]
