"""The drafter that a user chose, and the draft tokens of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_core.api.drafters import Drafter, DrafterContext, DrafterSpec
from tokenspeed_core.config.speculation_settings import Speculation
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.scheduler.draft_depth import AdaptiveDepth
from tokenspeed_core.scheduler.drafts import HostDrafts
from tokenspeed_core.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter with its settings. `max_drafts` is the number of draft tokens of a row at most."""

    entry: Entry
    spec: DrafterSpec
    max_drafts: int
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """Describe the choice for the log."""
        return f"{self.entry}, at most {self.max_drafts} draft tokens"


def find_drafter(wanted: Speculation | None, catalog: Catalog) -> DrafterChoice | None:
    """Return the drafter that the settings name, if any. Raises PluginError, and ConfigError for its options."""
    if wanted is None:
        return None
    entry = catalog.get("drafters", wanted.drafter, flag=wanted.flag)
    spec = catalog.need(entry, DrafterSpec)
    try:
        spec.check_options(wanted.options)
    except ValueError as error:
        raise ConfigError(f"{wanted.flag}: {error}") from error
    return DrafterChoice(entry, spec, wanted.max_drafts, wanted.options)


def use_drafter(scheduler: Scheduler, choice: DrafterChoice) -> None:
    """Make a drafter, and give the scheduler's rows its draft tokens. Raises PluginError."""
    limits = scheduler.limits
    context = DrafterContext(
        limits.vocab_size,
        limits.max_num_seqs,
        limits.max_model_len,
        choice.max_drafts,
        choice.options,
    )
    expected: type[Drafter] = Drafter  # type: ignore[type-abstract]
    drafter = make(choice.entry, choice.spec.load, lambda: choice.spec.make(context), expected)
    scheduler.use_drafts(
        HostDrafts(
            drafter,
            str(choice.entry),
            AdaptiveDepth(limits.max_num_seqs, choice.max_drafts),
            limits,
            scheduler.columns,
            scheduler.sequences,
        )
    )
