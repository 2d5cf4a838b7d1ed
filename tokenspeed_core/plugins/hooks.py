"""Calls the hooks of the installed plugins, each apart, so that one's failure is not another's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pluggy

from tokenspeed_core.api import hooks as hookspecs
from tokenspeed_core.api.hooks import RequestRecord, StepRecord
from tokenspeed_core.config.build import rebuild
from tokenspeed_core.config.schema import Config, flag, metadata
from tokenspeed_core.errors import PluginError, TokenSpeedError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.selection import Selection

_DECIDED = (
    "no_plugins",
    "plugins_lock",
    "strict_plugins",
)  # which plugins are used, before any of them is asked
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
        is_wanted = any(
            getattr(manager.hook, hook).get_hookimpls() for manager in self._managers.values()
        )
        return partial(self._observe, hook) if is_wanted else None

    @contextmanager
    def adjusted(self, config: Config) -> Iterator[Config]:
        """Give the configuration with the plugins' changes to what the user left open, for what is done with it.

        Of a plugin that fails, or whose change is out of bounds, nothing is taken. Raises PluginError
        instead under --strict-plugins. An error about a setting that a plugin changed says that it did.
        """
        for name, manager in list(self._managers.items()):
            adjusted = config
            with self._apart(name, "adjust_config", is_start=True):
                for changes in manager.hook.adjust_config(config=config):
                    adjusted = _apply(adjusted, name, changes)
                config = adjusted
        try:
            yield config
        except TokenSpeedError as error:
            said = str(error)
            for name in type(config).model_fields:
                by, words = config.origin(name), {word.strip("`:;,()") for word in said.split()}
                if (
                    by.startswith("plugin ")
                    and by not in said
                    and words & {flag(name), metadata(name)["kind"]}
                ):
                    out = Selection.read().without(
                        f"{by.removeprefix('plugin ').partition(':')[0]}:hooks"
                    )
                    error.args = (
                        f"{error}; {by} set {flag(name)}: give your own, or {out} goes without its changes",
                    )
            raise

    def add_middleware(self, app: Any) -> Any:
        """Return the server's ASGI app in the wrappings of the plugins, without those that fail.

        Raises PluginError instead under --strict-plugins.
        """
        for name, manager in list(self._managers.items()):
            with self._apart(name, "add_middleware", is_start=True):
                for wrapped in manager.hook.add_middleware(app=app):
                    if not callable(wrapped):
                        raise TypeError(f"a {type(wrapped).__name__} is no ASGI app")
                    app = wrapped
        return app

    def _observe(self, hook: str, record: RequestRecord | StepRecord) -> None:
        for name, manager in list(self._managers.items()):
            with self._apart(name, hook):
                getattr(manager.hook, hook)(record=record)

    @contextmanager
    def _apart(self, name: str, hook: str, *, is_start: bool = False) -> Iterator[None]:
        """Log what fails of a plugin, and forget the plugin. Raises PluginError instead at a start that is strict."""
        try:
            yield
        except (
            Exception,
            SystemExit,
        ) as error:  # plugin code may raise anything, and must not harm what calls it
            if is_start and self._strict:
                what = f"{type(error).__name__}: {error}; --strict-plugins ends the start for it"
                raise PluginError(f"hooks of {name} failed in {hook}: {what}") from error
            logger.error(
                "hooks of %s failed in %s and are switched off", name, hook, exc_info=error
            )
            del self._managers[name]


def _apply(config: Config, name: str, changes: Any) -> Config:
    allowed = {}
    for setting, value in dict(changes).items():
        if setting in _DECIDED:
            raise PluginError(
                f"{setting} says which plugins are used, so none can change it: a user has to"
            )
        if config.origin(setting) in ("default", "auto"):
            allowed[setting] = value
        else:
            logger.warning(
                "plugin %s would change %s, which %s sets: left",
                name,
                setting,
                config.origin(setting),
            )
    return rebuild(config, allowed, f"plugin {name}")
