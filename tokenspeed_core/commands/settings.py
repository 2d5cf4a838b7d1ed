"""Functions for commands that take the flags of all settings. Importing it imports the configuration."""

from __future__ import annotations

from tokenspeed_core.cli.settings import (
    ConfigFile,
    ModelArgument,
    SettingsCommand,
    config_of,
    configure,
    help_topic,
    print_help,
    with_settings,
)
from tokenspeed_core.config import Config
from tokenspeed_core.config.readers import split_names
from tokenspeed_core.config.schema import LogLevel
from tokenspeed_core.config.settings import Settings, setting
from tokenspeed_core.config.sources import key_for_server, without_settings
from tokenspeed_core.engine.parent_death import end_with_parent
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.logs import set_up_log

__all__ = [
    "Config",
    "ConfigFile",
    "EngineDeadError",
    "LogLevel",
    "ModelArgument",
    "Settings",
    "SettingsCommand",
    "config_of",
    "configure",
    "end_with_parent",
    "help_topic",
    "key_for_server",
    "print_help",
    "set_up_log",
    "setting",
    "split_names",
    "with_settings",
    "without_settings",
]
