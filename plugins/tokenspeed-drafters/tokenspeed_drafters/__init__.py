"""Drafters for speculative decoding: from earlier tokens, and with draft models."""

from tokenspeed_core.api import DrafterSpec, ModelDrafterSpec

NGRAM = DrafterSpec(
    load="tokenspeed_drafters.ngram:NgramDrafter", check="tokenspeed_drafters.ngram:check"
)
SUFFIX = DrafterSpec(
    load="tokenspeed_drafters.suffix:SuffixDrafter", check="tokenspeed_drafters.suffix:check"
)
MTP = ModelDrafterSpec(
    plan="tokenspeed_drafters.models:plan_mtp",
    check="tokenspeed_drafters.models:check",
    needs_checkpoint=False,
)
DRAFT_MODEL = ModelDrafterSpec(
    plan="tokenspeed_drafters.models:plan_draft_model",
    check="tokenspeed_drafters.models:check",
    needs_checkpoint=True,
)
