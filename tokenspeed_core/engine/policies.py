"""The scheduling policy of a name: one of the scheduler's own, or a plugin's."""

from __future__ import annotations

from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins.catalog import Catalog
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
    of = f"policies {name} of {entry.distribution} {entry.version}"
    try:
        policy = factory()  # type: ignore[misc]  # what is no function is answered below
    except Exception as error:  # plugin code may raise anything, and the user is told in one line
        raise PluginError(f"{of}: its factory {entry.value} fails: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise PluginError(f"{of}: {entry.value} makes a {type(policy).__name__}, which lacks what a Policy has")
    return policy
