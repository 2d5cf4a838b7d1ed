"""Finds the quantization method of a checkpoint among the installed ones. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_core.api.quantization import LayerSchemes, Quantization
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.targets import load_target

_MALFORMED = (KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class ResolvedQuantization:
    """The quantization method in use, and the scheme of each linear layer."""

    name: str
    scheme_of: LayerSchemes


def find_quantization(
    name: str | None, checkpoint: ResolvedCheckpoint, catalog: Catalog
) -> ResolvedQuantization | None:
    """Return the method of a checkpoint, or the one that `--quantization` names; None if there is neither.

    Raises CheckpointError, ConfigError or PluginError.
    """
    settings = _settings(checkpoint.config)
    if settings is not None and not isinstance(settings, Mapping):
        raise CheckpointError(
            f"{checkpoint.path}/config.json: quantization_config is {settings!r:.300}, expected an object. Correct "
            "config.json."
        )
    if name is not None:
        method = catalog.need(
            catalog.get("quantization", name, flag="--quantization"), Quantization
        )
        return _named(method, settings, checkpoint, catalog)
    return None if settings is None else _read(settings, checkpoint, catalog)


def _settings(config: Mapping[str, Any]) -> Any:
    """Return the quantization settings of a `config.json`, None for an unquantized model.

    Multimodal models have them next to the sizes of their text model.
    """
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                return holder[key]
    return None


def _named(
    method: Quantization,
    settings: Mapping[str, Any] | None,
    checkpoint: ResolvedCheckpoint,
    catalog: Catalog,
) -> ResolvedQuantization:
    """Return the method that the user named: it reads the checkpoint, or quantizes it on load."""
    if settings is None:
        scheme = method.on_load
        if scheme is None:
            raise ConfigError(
                f"--quantization {method.name} needs a quantized checkpoint, and {checkpoint.name} has no "
                f"quantization_config; give a checkpoint that is quantized as {method.name}, or choose another method"
            )
        return ResolvedQuantization(method.name, lambda layer: scheme)
    schemes, problem = _try(method, settings)
    if schemes is not None:
        return ResolvedQuantization(method.name, schemes)
    own = _read(settings, checkpoint, catalog)
    raise ConfigError(
        f"--quantization {method.name}: {checkpoint.name} is already quantized as {own.name}; omit --quantization"
        + (f" ({problem})" if problem else "")
    )


def _read(
    settings: Mapping[str, Any], checkpoint: ResolvedCheckpoint, catalog: Catalog
) -> ResolvedQuantization:
    """Return the first method that reads a `quantization_config`. Raises CheckpointError if none does."""
    problems: dict[str, str] = {}  # the first method with each reason, since some share a reader
    for entry in _in_order(settings, catalog):
        method = catalog.load(entry, Quantization)
        if method is None:
            continue
        schemes, problem = _try(method, settings)
        if schemes is not None:
            return ResolvedQuantization(method.name, schemes)
        if problem:
            problems.setdefault(problem.removesuffix("."), method.name)
    installed = ", ".join(catalog.names("quantization")) or "none"
    listed = "; ".join(f"{name}: {problem}" for problem, name in problems.items())
    reasons = listed or f"no installed method reads it; installed: {installed}"
    raise CheckpointError(
        f"{checkpoint.path}/config.json: quantization_config is not supported: {reasons}. Found: {settings!r:.300}. "
        "Use another checkpoint of the model, or an unquantized one with --quantization fp8."
    )


def _in_order(settings: Any, catalog: Catalog) -> Iterator[Entry]:
    """Yield the installed methods: the one named `quant_method` first."""
    own = settings.get("quant_method") if isinstance(settings, Mapping) else None
    entries = catalog.entries("quantization")
    yield from sorted(entries, key=lambda entry: (entry.name != own, entry.name))


def _try(method: Quantization, settings: Any) -> tuple[LayerSchemes | None, str]:
    """Return the schemes that a method reads, or None and the reason if it does not support the settings."""
    try:
        return load_target(method.read)(settings), ""
    except ValueError as error:
        return None, str(error)
    except _MALFORMED as error:
        return None, f"the settings are incomplete or malformed ({type(error).__name__}: {error})"
