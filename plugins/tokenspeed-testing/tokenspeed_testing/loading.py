"""Loading of entries as a server start does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenspeed_core.api.drafters import AnyDrafterSpec
from tokenspeed_core.api.grammars import GrammarSpec
from tokenspeed_core.api.kernels import Capability
from tokenspeed_core.api.logits_processors import LogitsProcessorSpec
from tokenspeed_core.api.models import Checkpoint, LoadFormat, ModelSpec
from tokenspeed_core.api.parsers import ParserSpec
from tokenspeed_core.api.quantization import Quantization
from tokenspeed_core.errors import describe_error
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops, installed_rankings
from tokenspeed_core.kernels.refusals import hardware_refusals
from tokenspeed_core.kernels.select import has_module
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX
from tokenspeed_core.targets import load_target

# The type of an entry's value, for the kinds that are loaded on demand.
_DESCRIPTORS: Mapping[str, type[Any]] = {
    "drafters": AnyDrafterSpec,
    "grammars": GrammarSpec,
    "logits_processors": LogitsProcessorSpec,
    "models": ModelSpec,
    "load_formats": LoadFormat,
    "quantization": Quantization,
    "checkpoints": Checkpoint,
    "tool_parsers": ParserSpec,
    "reasoning_parsers": ParserSpec,
}
_CALLED = ("commands", "policies", "preflight")


def try_load(entry: Entry, entries: Sequence[Entry]) -> Entry:
    """Load an entry, and return it with status `failed` and the reason if a start would leave it out.

    `entries` are all installed entries, in the catalog's order.
    """
    catalog = _with_ops(entry, entries)
    if entry.kind.startswith(KERNELS_PREFIX):
        installed_kernels(catalog)
    elif entry.kind == "ops":
        installed_ops(catalog)
    elif entry.kind == "rankings":
        installed_rankings(catalog)
    elif entry.kind == "hooks":
        Hooks.load(catalog)
    else:
        _load_on_demand(entry, catalog)
    return next(each for each in catalog.all() if each.scopes == entry.scopes)


def kernel_failures(entry: Entry, entries: Sequence[Entry]) -> Iterator[str]:
    """Import the kernels of an entry that may run on this machine; yield the failures."""
    for kernel in installed_kernels(_with_ops(entry, entries)):
        spec = kernel.spec
        if all(map(has_module, spec.requires)) and _may_run_here(spec.capability):
            try:
                load_target(spec.load)
                spec.schema()
            except (Exception, SystemExit) as error:  # plugin code may raise anything
                yield f"{spec.op}: it does not load: {describe_error(error)}"


def _with_ops(entry: Entry, entries: Sequence[Entry]) -> Catalog:
    """Return a catalog of an entry and the ops that it may need."""
    # Check the entry even if its name conflicts with another one.
    alone = replace(entry, status=Status.OK, reason="")
    if entry.kind != "ops" and not entry.kind.startswith(KERNELS_PREFIX):
        return Catalog([alone])
    kept = [
        each for each in entries if each == entry or (each.kind, each.status) == ("ops", Status.OK)
    ]
    return Catalog([alone if each == entry else each for each in kept])


def _load_on_demand(entry: Entry, catalog: Catalog) -> None:
    (alone,) = catalog.all()
    value = catalog.load(alone, _DESCRIPTORS.get(entry.kind, object))
    if entry.kind in _CALLED and value is not None and not callable(value):
        found = f"{value!r:.60} (of type {type(value).__name__})"
        catalog.reject(alone, f"{entry.value} is {found}, expected a callable")


def _may_run_here(capability: Capability) -> bool:
    """Return whether this machine has a device that a kernel declares."""
    if "cpu" in capability.platforms:
        return True
    if not has_module("torch"):
        return False
    from tokenspeed_core.worker.platform import describe_device, resolve_device

    return not any(hardware_refusals(capability, describe_device(resolve_device("auto"))))
