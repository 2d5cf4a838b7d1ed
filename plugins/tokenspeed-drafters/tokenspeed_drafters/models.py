"""The drafters that are models: `mtp` and `draft_model`. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import ANY_ARCHITECTURE, DraftModelInfo, DraftRequest, HiddenStates


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError if any option is given: these drafters have none."""
    for name in options:
        raise ValueError(f"this drafter has no option {name}. It takes no options.")


def plan_mtp(request: DraftRequest) -> DraftModelInfo:
    """Return the target's layers for multi-token prediction. Raises ValueError if it has none."""
    target = request.target
    assert target.spec is not None, "a resolved target has a family"
    if target.spec.architecture == ANY_ARCHITECTURE:
        named = ", ".join(target.config.get("architectures") or ())
        raise ValueError(
            f"no installed family supports the layers for multi-token prediction of {named}. Choose another drafter."
        )
    return target.spec.plan_mtp(target.config, target.path)


def plan_draft_model(request: DraftRequest) -> DraftModelInfo:
    """Return a smaller model of the same vocabulary. Raises ValueError if it does not fit the target."""
    draft, target = request.draft, request.target
    assert draft is not None and target.info is not None, "the core resolves both checkpoints"
    if draft.spec is None or draft.info is None:
        named = draft.config.get("architectures")
        raise ValueError(f"{draft.path}: no installed model family supports {named}")
    if draft.info.vocab_size != target.info.vocab_size:
        raise ValueError(
            f"{draft.path} has a vocabulary of {draft.info.vocab_size} tokens, and the target has "
            f"{target.info.vocab_size}. Use a draft model with the target's tokenizer."
        )
    return DraftModelInfo(
        load="tokenspeed_drafters.draft_model:SmallerModel",
        config={"spec": draft.spec, "config": draft.config},
        cache_groups=draft.info.cache_groups,
        num_layers=draft.info.num_layers,
        num_parameters=draft.info.num_parameters,
        weights=draft.path,
        hidden=HiddenStates.NONE,
    )
