"""Calls the hooks of the installed plugins, each apart, so that one's failure is not another's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import hookspecs
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.hookspecs import RequestRecord, StepRecord

if TYPE_CHECKING:
    from tokenspeed_core.config import Config

_DECIDED = ("no_plugins", "plugins_lock", "strict_plugins")  # which plugins are used, before any of them is asked
logger = logging.getLogger("tokenspeed.plugins")


class Hooks:
    """The hook modules of one process, in the catalog's order, each with a plugin manager of its own.

    One that misbehaves is switched off, with its traceback in the log; `strict`, it ends the start.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._managers: dict[str, pluggy.PluginManager] = {}

    @classmethod
    def load(cls, catalog: Catalog) -> Hooks:
        """Import the modules of `tokenspeed.hooks`. Raises PluginError as `Catalog.load` does.

        A module with a hook that does not exist is left out as one whose import fails is.
        """
        hooks = cls(strict=catalog.is_strict)
        for entry in catalog.entries("hooks"):
            module = catalog.load(entry, ModuleType)
            if module is None:
                continue
            try:
                hooks.register(module, f"{entry.distribution}:{entry.name}")
            except PluginError as error:
                catalog.reject(entry, str(error))
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

    def observer(self, hook: str) -> Callable[[Any], None] | None:
        """Return what tells the plugins of a record, None where nobody implements the hook: it need not be made."""
        is_wanted = any(getattr(manager.hook, hook).get_hookimpls() for manager in self._managers.values())
        return partial(self._observe, hook) if is_wanted else None

    def adjust(self, config: Config) -> Config:
        """Return the configuration with the plugins' changes to what the user left open.

        Of a plugin that fails, or whose change is out of bounds, nothing is taken. Raises PluginError
        instead under --strict-plugins.
        """
        for name, manager in list(self._managers.items()):
            adjusted = config
            try:
                for changes in manager.hook.adjust_config(config=config):
                    adjusted = _apply(adjusted, name, changes)
                config = adjusted
            except (Exception, SystemExit) as error:  # plugin code may raise anything
                self._switch_off(name, "adjust_config", error, is_start=True)
        return config

    def add_middleware(self, app: Any) -> Any:
        """Return the server's ASGI app in the wrappings of the plugins, without those that fail.

        Raises PluginError instead under --strict-plugins.
        """
        for name, manager in list(self._managers.items()):
            try:
                for wrapped in manager.hook.add_middleware(app=app):
                    if not callable(wrapped):
                        raise TypeError(f"a {type(wrapped).__name__} is no ASGI app")
                    app = wrapped
            except (Exception, SystemExit) as error:  # plugin code may raise anything
                self._switch_off(name, "add_middleware", error, is_start=True)
        return app

    def _observe(self, hook: str, record: RequestRecord | StepRecord) -> None:
        for name, manager in list(self._managers.items()):
            try:
                getattr(manager.hook, hook)(record=record)
            except (Exception, SystemExit) as error:  # whatever it raises must not harm what it observes
                self._switch_off(name, hook, error)

    def _switch_off(self, name: str, hook: str, error: BaseException, *, is_start: bool = False) -> None:
        """Log a failure and forget the plugin. Raises PluginError instead at a start that is strict."""
        if is_start and self._strict:
            what = f"{type(error).__name__}: {error}; --strict-plugins ends the start for it"
            raise PluginError(f"hooks of {name} failed in {hook}: {what}") from error
        logger.error("hooks of %s failed in %s and are switched off", name, hook, exc_info=error)
        del self._managers[name]


def _apply(config: Config, name: str, changes: Any) -> Config:
    from tokenspeed_core.config.build import rebuild

    allowed = {}
    for setting, value in dict(changes).items():
        if setting in _DECIDED:
            raise PluginError(f"{setting} says which plugins are used, so none can change it: a user has to")
        if config.origin(setting) in ("default", "auto"):
            allowed[setting] = value
        else:
            logger.warning("plugin %s would change %s, which %s sets: left", name, setting, config.origin(setting))
    return rebuild(config, allowed, f"plugin {name}")
