"""The drafters that are models: `mtp` and `draft_model`. Imports no tensor library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenspeed_core.api import ANY_ARCHITECTURE, DraftModelInfo, DraftRequest, HiddenStates

_MIN_EQUAL = 0.9  # share of equal tokens; special tokens of two models may differ


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
            f"{target.info.vocab_size}. Use a draft model with the same vocab_size."
        )
    _check_tokenizers(draft.path, target.path)
    return DraftModelInfo(
        load="tokenspeed_drafters.draft_model:SmallerModel",
        config={
            "spec": draft.spec,
            "config": draft.config,
            "max_model_len": draft.info.max_model_len,
        },
        cache_groups=draft.info.cache_groups,
        num_layers=draft.info.num_layers,
        num_parameters=draft.info.num_parameters,
        weights=draft.path,
        hidden=HiddenStates.NONE,
    )


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Raise ValueError if the tokenizers of two checkpoints differ in more than a few tokens.

    Only files in the format of `tokenizer.json` are compared.
    """
    found, expected = _token_ids(draft), _token_ids(target)
    num = min(len(found), len(expected))
    num_equal = sum(expected.get(token) == token_id for token, token_id in found.items())
    if num_equal < _MIN_EQUAL * num:
        raise ValueError(
            f"{draft} has another tokenizer than the target: {num_equal} of {num} tokens are equal. "
            "Use a draft model with the target's tokenizer."
        )


def _token_ids(folder: Path) -> Mapping[str, int]:
    """Return the id of each token of a checkpoint's `tokenizer.json`; empty without a readable file."""
    try:
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"][
            "vocab"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        return {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
    return vocabulary if isinstance(vocabulary, dict) else {}
