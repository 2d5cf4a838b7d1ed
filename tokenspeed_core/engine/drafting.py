"""Finds the drafter that the settings name, and connects it to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_core.api.drafters import (
    AnyDrafterSpec,
    DraftCheckpoint,
    Drafter,
    DrafterContext,
    DrafterSpec,
    DraftRequest,
    ModelDrafterSpec,
)
from tokenspeed_core.api.models import DraftModelInfo
from tokenspeed_core.config.parallel_settings import ParallelSizes
from tokenspeed_core.config.speculation_settings import (
    DEFAULT_MAX_DRAFTS,
    MAX_DRAFTS,
    Speculation,
)
from tokenspeed_core.errors import ConfigError, PluginError
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.scheduler.draft_depth import AdaptiveDepth
from tokenspeed_core.scheduler.drafts import DraftSource, HostDrafts
from tokenspeed_core.scheduler.model_drafts import ModelDrafts
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.targets import load_target

_OTHER_NAMES = {"nextn": "mtp", "standalone": "draft_model"}  # of drafters in other engines


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter with its settings. `max_drafts` is the maximum number of draft tokens of a row.

    `model` is set if the drafter is a model on the device, and `is_unquantized` if it is not quantized even if the target
    is.
    """

    entry: Entry
    spec: AnyDrafterSpec
    max_drafts: int
    options: Mapping[str, Any]
    model: DraftModelInfo | None = None
    is_unquantized: bool = False

    def __str__(self) -> str:
        """Describe the choice in one line."""
        model = self.model
        parameters = f", {model.num_parameters:,} parameters, {model.weights}" if model else ""
        plugin = f"{self.entry.distribution} {self.entry.version}"
        return f"{self.entry.name} of {plugin}, at most {self.max_drafts} draft tokens per row{parameters}"


def find_drafter(
    wanted: Speculation | None,
    catalog: Catalog,
    target: DraftCheckpoint,
    resolve_draft: Callable[[str], DraftCheckpoint],
) -> DrafterChoice | None:
    """Return the drafter that the settings name, if any.

    `resolve_draft` finds the checkpoint of a draft model. Raises PluginError, ConfigError for the drafter's options and
    for a model that does not fit the target, and the errors of `resolve_draft`.
    """
    if wanted is None:
        return None
    entry = _entry(wanted, catalog)
    spec = catalog.need(entry, AnyDrafterSpec)
    try:
        make(
            entry,
            spec.check,
            lambda: spec.check_options(wanted.options),
            type(None),
            (ValueError,),
        )
    except ValueError as error:
        raise ConfigError(
            f"{wanted.options_flag} with the drafter {wanted.drafter}: {error}"
        ) from error
    needs_checkpoint = isinstance(spec, ModelDrafterSpec) and spec.needs_checkpoint
    if needs_checkpoint and wanted.draft_model is None:
        raise ConfigError(
            f"{wanted.flag} {wanted.drafter} needs a draft model; give {wanted.model_flag}"
        )
    if wanted.draft_model is not None and not needs_checkpoint:
        raise ConfigError(
            f"{wanted.model_flag} has no effect with the drafter {wanted.drafter}; remove it"
        )
    if wanted.load_format is not None and not needs_checkpoint:
        raise ConfigError(
            f"--speculative-draft-load-format has no effect with the drafter {wanted.drafter}; remove it"
        )
    model = None
    if isinstance(spec, ModelDrafterSpec):
        draft = None if wanted.draft_model is None else resolve_draft(wanted.draft_model)
        request = DraftRequest(target, draft, wanted.options)
        plan = spec.plan
        try:
            model = make(
                entry, plan, lambda: load_target(plan)(request), DraftModelInfo, (ValueError,)
            )
        except ValueError as error:
            raise ConfigError(f"{wanted.flag} {wanted.drafter}: {error}") from error
    elif wanted.is_unquantized:
        raise ConfigError(
            f"--speculative-draft-model-quantization has no effect: the drafter {wanted.drafter} is not a model; remove it"
        )
    max_drafts = _max_drafts(wanted, model)
    return DrafterChoice(entry, spec, max_drafts, wanted.options, model, wanted.is_unquantized)


def _entry(wanted: Speculation, catalog: Catalog) -> Entry:
    """Return the drafter that the settings name. Raises ConfigError without a name, and PluginError.

    Other engines write names in capitals.
    """
    name, installed = wanted.drafter, catalog.names("drafters")
    if name not in installed:
        name = name.lower()
    if not name:
        raise ConfigError(
            f"{wanted.flag}: method is missing; installed: {', '.join(installed) or 'none'}"
        )
    other = "mtp" if name.endswith("_mtp") else _OTHER_NAMES.get(name)
    if other in installed and name not in installed:
        raise PluginError(f"{wanted.flag} {name}: no such drafter; use {other}")
    return catalog.get("drafters", name, flag=wanted.flag)


def _max_drafts(wanted: Speculation, model: DraftModelInfo | None) -> int:
    """Return the maximum number of draft tokens of a row: the setting's, the model's own, or the default.

    Raises ConfigError if the model makes fewer tokens than the setting says.
    """
    limit = None if model is None else model.max_drafts
    if limit is None:
        return wanted.max_drafts or DEFAULT_MAX_DRAFTS
    if wanted.max_drafts is not None and wanted.max_drafts > limit:
        assert model is not None, "it has a limit"
        raise ConfigError(
            f"{wanted.flag} {wanted.drafter}: {wanted.max_drafts} draft tokens per row, but {model.weights} makes at most "
            f"{limit}"
        )
    return wanted.max_drafts or min(limit, MAX_DRAFTS)


def check_is_alone(choice: DrafterChoice | None, sizes: ParallelSizes) -> None:
    """Raise ConfigError for a draft model in an engine that executes its steps together with other engines."""
    if choice is not None and choice.model is not None and sizes.num_sharing > 1:
        raise ConfigError(
            f"{choice.entry} is a draft model, which engines that share experts do not support; remove "
            "--enable-expert-parallel, or choose a drafter without a model"
        )


def use_drafter(scheduler: Scheduler, choice: DrafterChoice, *, with_prompts: bool) -> None:
    """Make a drafter and let the scheduler use it (`Scheduler.use_drafts`). Raises PluginError."""
    limits = scheduler.limits
    is_model = choice.model is not None
    depth = AdaptiveDepth(limits.max_num_seqs, choice.max_drafts, is_model=is_model)
    drafts: DraftSource
    if choice.model is not None:
        drafts = ModelDrafts(depth, limits, scheduler.columns)
    else:
        assert isinstance(choice.spec, DrafterSpec), "a drafter is a model or runs on the host"
        drafter = _make(choice, choice.spec, scheduler)
        drafts = HostDrafts(
            drafter, str(choice.entry), depth, limits, scheduler.columns, scheduler.sequences
        )
    scheduler.use_drafts(drafts, with_prompts=with_prompts)


def _make(choice: DrafterChoice, spec: DrafterSpec, scheduler: Scheduler) -> Drafter:
    """Return a drafter on the host. Raises PluginError."""
    limits = scheduler.limits
    context = DrafterContext(
        limits.vocab_size,
        limits.max_num_seqs,
        limits.max_model_len,
        choice.max_drafts,
        choice.options,
    )
    expected: type[Drafter] = Drafter  # type: ignore[type-abstract]
    return make(choice.entry, spec.load, lambda: spec.make(context), expected)
