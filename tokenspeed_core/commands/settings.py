"""For commands that take the flags of all settings; imports the configuration."""

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
from tokenspeed_core.logs import set_up_log

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
    "set_up_log",
    "with_settings",
    "without_settings",
]
