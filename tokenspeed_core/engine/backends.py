"""The backends that the user chose, as overrides of the kernel selection."""

from __future__ import annotations

from collections.abc import Iterator

from tokenspeed_core.config import Config
from tokenspeed_core.config.backends import AUTO
from tokenspeed_core.config.build import called
from tokenspeed_core.config.settings import flag
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.plugins.catalog import Catalog

_SETTINGS = {
    "attention_backend": "attention",
    "moe_backend": "moe",
    "sampling_backend": "sampling",
}
EXCHANGE_OP = "exchange_tokens"  # replaces _ALL2ALL_OPS if the chosen backend has it
_ALL2ALL_OPS = ("all_gather_tokens", "reduce_scatter_tokens")
_DRAFT_SETTINGS = {"drafter_attention_backend": "attention", "draft_moe_backend": "moe"}


def read_overrides(
    config: Config, catalog: Catalog, *, has_draft_model: bool = False
) -> tuple[Override, ...]:
    """Return the backends that the user chose. Raises ConfigError."""
    found = [
        Override.parse(scope, names, written)
        for setting, family in _SETTINGS.items()
        for scope, names, written in _choices(config, setting, family)
    ]
    for setting, family in _DRAFT_SETTINGS.items():
        for scope, names, written in _choices(config, setting, family):
            if not has_draft_model:
                raise ConfigError(
                    f"{written} has no effect: the drafter is not a model; remove it, or choose a drafter such as mtp"
                )
            found.append(Override.parse(scope, names, written, for_draft=True))
    if config.all2all_backend != AUTO:
        _, origin = called("all2all", config.origin("all2all_backend"))
        for op in _all2all_ops(config, catalog):
            found.append(Override.parse(op, config.all2all_backend, f"--all2all-backend{origin}"))
    _, origin = called("kernel", config.origin("kernel_backend"))
    for scope, names in config.kernel_backend.items():
        found.append(Override.parse(scope, names, f"--kernel-backend {scope}{origin}"))
    return tuple(found)


def _all2all_ops(config: Config, catalog: Catalog) -> tuple[str, ...]:
    """Return the ops that --all2all-backend chooses: they exchange tokens between engines that share experts."""
    name = config.all2all_backend[0]
    has_exchange = any(
        each.spec.op == EXCHANGE_OP and each.spec.backend == name
        for each in installed_kernels(catalog)
    )
    return (EXCHANGE_OP,) if has_exchange else _ALL2ALL_OPS


def _choices(
    config: Config, setting: str, family: str
) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the scope, the backends and the flag, as typed, of each value of a setting."""
    _, origin = called(family, config.origin(setting))
    for key, names in getattr(config, setting).items():
        scope = "" if key == "default" else f".{key}"
        if scope or names != AUTO:
            yield f"{family}{scope}", names, f"{flag(setting)}{scope}{origin}"
