"""Calls the hooks of the installed plugins, each apart, so that one's failure is not another's."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import hookspecs
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hookspecs import RequestRecord, StepRecord

if TYPE_CHECKING:
    from tokenspeed_core.config import Config

logger = logging.getLogger("tokenspeed.plugins")


class Hooks:
    """The hook modules of one process, in the catalog's order, each with a plugin manager of its own."""

    def __init__(self) -> None:
        self._managers: dict[str, pluggy.PluginManager] = {}

    @classmethod
    def load(cls, catalog: Catalog) -> Hooks:
        """Import the modules of `tokenspeed.hooks`. Raises PluginError as `Catalog.load` does."""
        hooks = cls()
        for entry in catalog.entries("hooks"):
            module = catalog.load(entry, ModuleType)
            if module is not None:
                hooks.register(module, f"{entry.distribution}:{entry.name}")
        return hooks

    def register(self, module: object, name: str) -> None:
        """Add an object with hook implementations. Raises PluginError for a hook that does not exist."""
        manager = pluggy.PluginManager("tokenspeed")
        manager.add_hookspecs(hookspecs)
        try:
            manager.register(module, name)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"hooks of {name}: {error}") from error
        self._managers[name] = manager

    def has(self, hook: str) -> bool:
        """Say whether anybody implements a hook, so that records need not be built for nobody."""
        return any(getattr(manager.hook, hook).get_hookimpls() for manager in self._managers.values())

    def adjust(self, config: Config) -> Config:
        """Return the configuration with the plugins' changes to what the user left open.

        Raises ConfigError, naming the plugin, where a change is out of bounds.
        """
        for name, manager in self._managers.items():
            for changes in manager.hook.adjust_config(config=config):
                config = _apply(config, name, changes)
        return config

    def observe_request(self, record: RequestRecord) -> None:
        """Tell the plugins of a request that ended."""
        self._observe("observe_request", record)

    def observe_step(self, record: StepRecord) -> None:
        """Tell the plugins of a step."""
        self._observe("observe_step", record)

    def add_middleware(self, app: Any) -> Any:
        """Return the server's ASGI app in the wrappings of the plugins. What one raises ends the start."""
        for manager in self._managers.values():
            for wrapped in manager.hook.add_middleware(app=app):
                app = wrapped
        return app

    def _observe(self, hook: str, record: RequestRecord | StepRecord) -> None:
        for name, manager in list(self._managers.items()):
            try:
                getattr(manager.hook, hook)(record=record)
            except Exception:  # an observer may raise anything, and must not harm what it observes
                logger.exception("hooks of %s failed in %s and are switched off", name, hook)
                del self._managers[name]


def _apply(config: Config, name: str, changes: Any) -> Config:
    from tokenspeed_core.config.build import rebuild

    allowed = {}
    for setting, value in dict(changes).items():
        if config.origin(setting) in ("default", "auto"):
            allowed[setting] = value
        else:
            logger.warning(
                "plugin %s would change %s, which %s sets: left", name, setting, config.origin(setting)
            )
    return rebuild(config, allowed, f"plugin {name}")
