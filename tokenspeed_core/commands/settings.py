"""What commands that take the flags of every setting need; imports the configuration."""

from __future__ import annotations

from tokenspeed_core.cli.settings import (
    ConfigFile,
    ModelArgument,
    SettingsCommand,
    configure,
    help_topic,
    print_help,
    with_settings,
)
from tokenspeed_core.config import Config
from tokenspeed_core.config.sources import without_settings
from tokenspeed_core.engine.parent_death import end_with_parent
from tokenspeed_core.errors import EngineDeadError

__all__ = [
    "Config",
    "ConfigFile",
    "EngineDeadError",
    "ModelArgument",
    "SettingsCommand",
    "configure",
    "end_with_parent",
    "help_topic",
    "print_help",
    "with_settings",
    "without_settings",
]
