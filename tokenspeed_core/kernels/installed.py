"""The installed kernels, op contracts and rankings, read through the plugin catalog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenspeed_core.api.kernels import AutoDistribution, KernelSpec, Ranking
from tokenspeed_core.api.ops import OpContract, OpReference, merge_ops
from tokenspeed_core.errors import ConfigError, suggest
from tokenspeed_core.kernels.overrides import DTYPE_FORMATS, FORMAT_SUFFIX, Override
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX
from tokenspeed_core.plugins.selection import DEFAULTS

_DEFAULT_KERNELS = "tokenspeed-kernels"


@dataclass(frozen=True, slots=True)
class InstalledKernel:
    """A kernel spec and the distribution that provides it.

    `required` is the plugin entry if the user named the plugin: then a failed import ends the start.
    `needs_ranking` keeps `auto` from choosing the kernel unless a ranking measured it.
    """

    spec: KernelSpec
    distribution: str
    required: Entry | None = None
    needs_ranking: bool = False


def installed_kernels(
    catalog: Catalog, overrides: Sequence[Override] = ()
) -> tuple[InstalledKernel, ...]:
    """Import the descriptors of all kernel entries and return their specs, in the catalog's order.

    An entry is a KernelSpec or a tuple of them. Invalid entries, and those without a known op, are left out. Raises
    PluginError under --strict-plugins and for an override that names a missing backend; ConfigError for an override
    of an unknown op or format.
    """
    found: list[InstalledKernel] = []
    ops, op_owners = _ops_and_owners(catalog)
    auto_distributions = _auto_distributions(catalog)
    for entry in catalog.all():
        if not entry.kind.startswith(KERNELS_PREFIX) or entry.status is not Status.OK:
            continue
        value = catalog.load(entry, object)
        if value is None:
            continue
        specs = value if isinstance(value, tuple) and value else (value,)
        wrong = [reason for spec in specs if (reason := spec_error(spec, entry.name, ops))]
        if wrong:
            catalog.reject(entry, wrong[0])
            continue
        if not any(spec.op in ops for spec in specs):
            name = specs[0].op
            catalog.reject(entry, f"no installed plugin defines the op {name}{suggest(name, ops)}")
            continue
        required = entry if catalog.is_required(entry) else None
        for spec in specs:
            is_auto = (
                entry.distribution in auto_distributions
                or entry.distribution == op_owners.get(spec.op)
                or spec.reference
            )
            found.append(InstalledKernel(spec, entry.distribution, required, not is_auto))
    _check_overrides(overrides, catalog, ops)
    return tuple(found)


def spec_error(spec: object, name: str, ops: Mapping[str, OpContract]) -> str:
    """Return why the value of a kernel entry is invalid, "" if it is valid.

    It must be a KernelSpec with the entry's name as its backend. Only the op's own reference may set `reference`.
    """
    if not isinstance(spec, KernelSpec) or spec.backend != name:
        return f"{spec!r} is not a KernelSpec with backend {name!r}"
    if spec.reference and spec.op in ops and spec.load != ops[spec.op].reference:
        reference = ops[spec.op].reference or "no installed plugin declares one"
        return f"reference=True, but {spec.load} is not the reference of {spec.op}: {reference}"
    return ""


def installed_ops(catalog: Catalog) -> Mapping[str, OpContract]:
    """Return the op contracts of the core and of plugins, by name.

    An entry that is not an OpContract or a tuple of them, or that takes a used name, is left out. Raises PluginError
    under --strict-plugins.
    """
    return _ops_and_owners(catalog)[0]


def _ops_and_owners(catalog: Catalog) -> tuple[Mapping[str, OpContract], dict[str, str]]:
    """Return the op contracts by name, and the distribution of each one that a plugin provides."""
    found: list[OpContract | OpReference] = []
    owners: dict[str, str] = {}
    for entry in catalog.entries("ops"):
        value = catalog.load(entry, object)
        if value is None:
            continue
        contracts = value if isinstance(value, tuple) else (value,)
        has_reference = any(isinstance(each, OpReference) for each in contracts)
        if has_reference and entry.distribution not in DEFAULTS:
            catalog.reject(entry, "only default distributions define references of the core's ops")
            continue
        try:
            merge_ops(found, contracts)
        except ValueError as error:
            catalog.reject(entry, str(error))
            continue
        found += contracts
        for each in contracts:
            if isinstance(each, OpContract):
                owners[each.name] = entry.distribution
    return merge_ops(found), owners


def installed_rankings(catalog: Catalog) -> tuple[Ranking, ...]:
    """Return the measured rankings of backends."""
    return tuple(each for each in _rankings_entries(catalog) if isinstance(each, Ranking))


def _auto_distributions(catalog: Catalog) -> frozenset[str]:
    """Return the distributions from which `auto` may choose kernels without a measured ranking."""
    declared = (each for each in _rankings_entries(catalog) if isinstance(each, AutoDistribution))
    return DEFAULTS.union(each.name for each in declared)


def _rankings_entries(catalog: Catalog) -> Iterator[object]:
    for entry in catalog.entries("rankings"):
        yield from catalog.load(entry, tuple) or ()


def _check_overrides(
    overrides: Sequence[Override], catalog: Catalog, ops: Mapping[str, OpContract]
) -> None:
    for override in overrides:
        covered = [op for op in ops.values() if override.target in (op.family, op.name)]
        if not covered:
            known = ", ".join(
                sorted({name for op in ops.values() for name in (op.family, op.name)})
            )
            raise ConfigError(f"{override.flag}: unknown op {override.target!r}. Known: {known}.")
        suffixes = {found[1] for op in covered if (found := FORMAT_SUFFIX.search(op.name))}
        if override.format not in (None, *DTYPE_FORMATS, *suffixes):
            formats = ", ".join((*DTYPE_FORMATS, *sorted(suffixes)))
            raise ConfigError(
                f"{override.flag}: {override.target} has no format {override.format}. Formats: {formats}."
            )
        kind = f"{KERNELS_PREFIX}{min(op.family for op in covered)}"
        for name in sorted({*override.backends} - {"auto"}):
            catalog.get(kind, name)  # raises if it is missing


def how_to_get_kernels(catalog: Catalog) -> str:
    """Return a hint for the case that no kernel fits: enable a disabled plugin, or install the default kernels."""
    kernels = [entry for entry in catalog.all() if entry.kind.startswith(KERNELS_PREFIX)]
    left_out = {e.distribution: e.reason for e in kernels if e.status is Status.DISABLED}
    if left_out:
        return "; ".join(f"{name} is installed, but {reason}" for name, reason in left_out.items())
    return (
        ""
        if any(entry.distribution == _DEFAULT_KERNELS for entry in kernels)
        else f"pip install {_DEFAULT_KERNELS}"
    )
