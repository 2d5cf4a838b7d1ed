"""The scheduling policy of a name: one of the scheduler's own, or a plugin's."""

from __future__ import annotations

from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.scheduler.decisions import Policy
from tokenspeed_core.scheduler.policy import POLICIES


def find_policy(name: str, catalog: Catalog) -> Policy:
    """Return the policy that users call `name`; a plugin's is made by the factory that its entry names.

    Raises PluginError, in one line, on an unknown name, and where the plugin makes no policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    entry = catalog.get("policies", name)
    factory = catalog.load(entry, required=True)
    return make(entry, entry.value, factory, Policy)  # type: ignore[type-abstract]
