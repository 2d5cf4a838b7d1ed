"""The frozen configuration, and its sources: flags, environment variables, YAML files and Python keywords."""

from tokenspeed_core.config.schema import C, Config

__all__ = ["C", "Config"]
