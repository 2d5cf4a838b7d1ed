"""The conformance kit on llguidance."""

from __future__ import annotations

from tokenspeed_grammars_llguidance import SPEC
from tokenspeed_testing.grammar import GrammarConformance


class TestLLGuidance(GrammarConformance):
    spec = SPEC
