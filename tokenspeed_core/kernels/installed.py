"""The kernels and op contracts that plugins brought, read through the plugin catalog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenspeed_core.api.kernels import (
    DTYPES,
    AutoDistribution,
    InstalledKernel,
    KernelSpec,
    Ranking,
)
from tokenspeed_core.api.ops import OpContract, merge_ops
from tokenspeed_core.errors import ConfigError, suggest
from tokenspeed_core.kernels.overrides import FORMAT, SHORT, Override
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Status
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX
from tokenspeed_core.plugins.selection import DEFAULTS

_USUAL = "tokenspeed-kernels"


def installed_kernels(
    catalog: Catalog, wishes: Sequence[Override] = ()
) -> tuple[InstalledKernel, ...]:
    """Import the descriptors of all kernel entries and return their specs, in the catalog's order.

    An entry's value is a KernelSpec or a tuple of them, each as `misfit` wants it. One that is neither, or whose ops
    have no contract here, is left out as one whose import fails is. Raises PluginError under --strict-plugins, and for
    a wish about a backend that is not there or was left out; ConfigError for one about no known op or format.
    """
    found: list[InstalledKernel] = []
    ops, op_owners = _ops_and_owners(catalog)
    auto_distributions = _auto_distributions(catalog)
    for entry in catalog.all():
        if not entry.kind.startswith(KERNELS_PREFIX) or entry.status is not Status.OK:
            continue
        value = catalog.load(entry, object)
        specs = value if isinstance(value, tuple) and value else (value,)
        if value is not None and (
            wrong := list(filter(None, (misfit(spec, entry.name, ops) for spec in specs)))
        ):
            catalog.reject(entry, wrong[0])
        elif value is not None and not any(spec.op in ops for spec in specs):
            catalog.reject(
                entry, f"no plugin here has an op {specs[0].op}{suggest(specs[0].op, ops)}"
            )
        elif value is not None:
            required = entry if catalog.is_required(entry) else None
            for spec in specs:
                is_auto = (
                    entry.distribution in auto_distributions
                    or entry.distribution == op_owners.get(spec.op)
                    or spec.reference
                )
                found.append(InstalledKernel(spec, entry.distribution, required, not is_auto))
    _check_names(wishes, catalog, ops)
    return tuple(found)


def misfit(spec: object, name: str, ops: Mapping[str, OpContract]) -> str:
    """Return why what a kernel entry of that name holds is left out, "" where it is not.

    It is a KernelSpec with that name as its backend, and it is not called the reference of an op that has another.
    """
    if not isinstance(spec, KernelSpec) or spec.backend != name:
        return f"{spec!r} is no KernelSpec of backend {name!r}"
    if spec.reference and spec.op in ops and spec.load != ops[spec.op].reference:
        return f"it says reference=True and loads {spec.load}; that of {spec.op} is {ops[spec.op].reference}"
    return ""


def installed_ops(catalog: Catalog) -> Mapping[str, OpContract]:
    """Return the core's op contracts and those of plugins, by name.

    An entry that is not an OpContract or a tuple of them, or that takes a used name, is left out. Raises PluginError
    under --strict-plugins.
    """
    return _ops_and_owners(catalog)[0]


def _ops_and_owners(catalog: Catalog) -> tuple[Mapping[str, OpContract], dict[str, str]]:
    """Return the op contracts by name, and the distribution of each one that a plugin provides."""
    found: list[OpContract] = []
    owners: dict[str, str] = {}
    for entry in catalog.entries("ops"):
        value = catalog.load(entry, object)
        if value is None:
            continue
        contracts = value if isinstance(value, tuple) else (value,)
        try:
            merge_ops(found, contracts)
        except ValueError as error:
            catalog.reject(entry, str(error))
            continue
        found += contracts
        owners.update((contract.name, entry.distribution) for contract in contracts)
    return merge_ops(found), owners


def installed_rankings(catalog: Catalog) -> tuple[Ranking, ...]:
    """Return the measured rankings of backends."""
    return tuple(each for each in _rankings_entries(catalog) if isinstance(each, Ranking))


def _auto_distributions(catalog: Catalog) -> frozenset[str]:
    """Return the distributions whose kernels `auto` may choose without a measured ranking."""
    declared = (each for each in _rankings_entries(catalog) if isinstance(each, AutoDistribution))
    return DEFAULTS.union(each.name for each in declared)


def _rankings_entries(catalog: Catalog) -> Iterator[object]:
    for entry in catalog.entries("rankings"):
        yield from catalog.load(entry, tuple) or ()


def _check_names(
    wishes: Sequence[Override], catalog: Catalog, ops: Mapping[str, OpContract]
) -> None:
    for wish in wishes:
        of = {op.name: op.family for op in ops.values() if wish.target in (op.family, op.name)}
        if not of:
            known = ", ".join(
                sorted({name for op in ops.values() for name in (op.family, op.name)})
            )
            raise ConfigError(
                f"{wish.flag}: there is no op or family {wish.target!r}; there is {known}"
            )
        formats = sorted({found[1] for name in of if (found := FORMAT.search(name))})
        if wish.dtype not in (None, *DTYPES, *formats):
            raise ConfigError(
                f"{wish.flag}: no op of {wish.target} is named after {wish.dtype}; it may be narrowed to "
                f"{', '.join((*SHORT, *formats))}"
            )
        for name in sorted({*wish.backends} - {"auto"}):
            catalog.get(
                f"{KERNELS_PREFIX}{min(of.values())}", name
            )  # in a list it would be passed over


def how_to_get_kernels(catalog: Catalog) -> str:
    """Return what to do where no kernel fits: what is installed and left out comes back, what is missing comes."""
    kernels = [entry for entry in catalog.all() if entry.kind.startswith(KERNELS_PREFIX)]
    left_out = {
        e.distribution: e.reason for e in kernels if e.status in (Status.DISABLED, Status.SHADOWED)
    }
    if left_out:
        return "; ".join(f"{name} is installed, but {reason}" for name, reason in left_out.items())
    return "" if any(entry.distribution == _USUAL for entry in kernels) else f"pip install {_USUAL}"
