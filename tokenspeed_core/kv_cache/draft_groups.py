"""Joins the cache groups of a target model and a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from tokenspeed_core.api.cache_groups import CacheGroupSpec


def join_groups(
    target: Sequence[CacheGroupSpec], draft: Sequence[CacheGroupSpec]
) -> tuple[tuple[CacheGroupSpec, ...], Mapping[str, str]]:
    """Return the groups of both models, and the group for each group of the draft model.

    A draft group that equals one of the target's, apart from the number of layers, adds its layers to it: both then
    share block tables. Any other group is kept under its name with a prefix.
    """
    groups, names = list(target), {}
    for added in draft:
        for i, group in enumerate(groups):
            if _is_alike(group, added):
                groups[i] = _changed(group, num_layers=group.num_layers + added.num_layers)
                names[added.name] = group.name
                break
        else:
            names[added.name] = f"draft_{added.name}"
            groups.append(_changed(added, name=names[added.name]))
    return tuple(groups), names


def _is_alike(group: CacheGroupSpec, added: CacheGroupSpec) -> bool:
    return type(group) is type(added) and group == _changed(
        added, name=group.name, num_layers=group.num_layers
    )


def _changed(group: CacheGroupSpec, **values: Any) -> CacheGroupSpec:
    assert is_dataclass(group), "cache groups are dataclasses"
    changed: Any = replace(group, **values)
    result: CacheGroupSpec = changed
    return result
