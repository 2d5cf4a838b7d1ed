"""Drafters for speculative decoding that need no draft model."""

from tokenspeed_core.api import DrafterSpec

NGRAM = DrafterSpec(
    load="tokenspeed_drafters.ngram:NgramDrafter", check="tokenspeed_drafters.ngram:check"
)
SUFFIX = DrafterSpec(
    load="tokenspeed_drafters.suffix:SuffixDrafter", check="tokenspeed_drafters.suffix:check"
)
