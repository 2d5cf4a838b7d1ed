"""Loads and calls the hooks of installed plugins. A plugin that fails does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pluggy

from tokenspeed_core.api import hooks as hookspecs
from tokenspeed_core.api.hooks import RequestRecord, StepRecord
from tokenspeed_core.config.build import rebuild
from tokenspeed_core.config.schema import C
from tokenspeed_core.config.settings import flag
from tokenspeed_core.errors import PluginError, describe_error
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.selection import VARIABLE

# These settings decide which plugins are loaded, so plugins cannot change them.
_PLUGIN_SETTINGS = ("no_plugins", "plugins_lock", "strict_plugins")
logger = logging.getLogger("tokenspeed.plugins")


@dataclass(frozen=True, slots=True)
class _Plugin:
    manager: pluggy.PluginManager
    is_required: bool


class Hooks:
    """The hook modules of one process, in the catalog's order.

    Each module has its own plugin manager. A module that raises is logged and switched off. At start,
    a required one (named or locked by the user, or any with --strict-plugins) raises PluginError.
    """

    def __init__(self) -> None:
        self._plugins: dict[str, _Plugin] = {}

    @classmethod
    def load(cls, catalog: Catalog) -> Hooks:
        """Import the modules of the group `tokenspeed.hooks`.

        A module with an unknown hook is left out like one that fails to import. Raises PluginError as
        `Catalog.load` does.
        """
        hooks = cls()
        for entry in catalog.entries("hooks"):
            module = catalog.load(entry, ModuleType)
            if module is None:
                continue
            name = f"{entry.distribution}:{entry.name}"
            try:
                hooks.register(module, name, is_required=catalog.is_required(entry))
            except PluginError as error:
                catalog.reject(entry, str(error))
        return hooks

    def register(self, module: object, name: str, *, is_required: bool = False) -> None:
        """Add an object with hook implementations. Raises PluginError for an unknown hook."""
        manager = pluggy.PluginManager("tokenspeed")
        manager.add_hookspecs(hookspecs)
        try:
            manager.register(module, name)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"hooks of {name}: {error}") from error
        self._plugins[name] = _Plugin(manager, is_required)

    def observer(self, hook: str) -> Callable[[Any], None] | None:
        """Return a function that passes a record to every plugin, or None if no plugin implements the hook."""
        for plugin in self._plugins.values():
            if getattr(plugin.manager.hook, hook).get_hookimpls():
                return partial(self._observe, hook)
        return None

    def adjust_config(self, config: C) -> C:
        """Return the configuration with the changes of all plugins to settings that the user did not set.

        If a plugin fails or sets an invalid value, none of its changes are used. Raises PluginError if
        that plugin is required.
        """
        for name, plugin in list(self._plugins.items()):
            with self._isolated(name, "adjust_config", is_start=True):
                adjusted = config
                for changes in plugin.manager.hook.adjust_config(config=config):
                    adjusted = _apply(adjusted, name, changes)
                config = adjusted
        return config

    def add_middleware(self, app: Any) -> Any:
        """Return the server's ASGI app wrapped by the plugins' middleware.

        Middleware that fails is left out. Raises PluginError if its plugin is required.
        """
        for name, plugin in list(self._plugins.items()):
            with self._isolated(name, "add_middleware", is_start=True):
                for wrapped in plugin.manager.hook.add_middleware(app=app):
                    if not callable(wrapped):
                        raise TypeError(f"expected an ASGI app, found a {type(wrapped).__name__}")
                    app = wrapped
        return app

    def _observe(self, hook: str, record: RequestRecord | StepRecord) -> None:
        for name, plugin in list(self._plugins.items()):
            with self._isolated(name, hook):
                getattr(plugin.manager.hook, hook)(record=record)

    @contextmanager
    def _isolated(self, name: str, hook: str, *, is_start: bool = False) -> Iterator[None]:
        """Log an exception and disable the plugin's hooks.

        Raises PluginError instead if a required plugin fails at start.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if is_start and self._plugins[name].is_required:
                distribution = name.partition(":")[0]
                raise PluginError(
                    f"hook {hook} of {name} failed: {describe_error(error)}. "
                    f"Fix the plugin, or disable its hooks with {VARIABLE}=-{distribution}:hooks."
                ) from error
            logger.error(
                "hook %s of %s failed; all hooks of this plugin are disabled",
                hook,
                name,
                exc_info=error,
            )
            del self._plugins[name]


def _apply(config: C, name: str, changes: Any) -> C:
    allowed = {}
    for setting, value in dict(changes).items():
        if setting in _PLUGIN_SETTINGS:
            raise PluginError(f"plugins cannot change {flag(setting)}")
        origin = config.origin(setting)
        if origin in ("default", "auto"):
            allowed[setting] = value
        else:
            logger.warning(
                "plugin %s cannot change %s, which is set by %s", name, flag(setting), origin
            )
    adjusted = rebuild(config, allowed, f"plugin {name}")
    for setting in allowed:
        logger.info("plugin %s set %s", name, flag(setting))
    return adjusted
