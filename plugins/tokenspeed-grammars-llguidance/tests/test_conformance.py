"""The conformance kit on llguidance."""

from __future__ import annotations

import pytest
from tokenspeed_grammars_llguidance import SPEC, backend
from tokenspeed_testing.grammar import VOCABULARY, GrammarConformance

from tokenspeed_core.api import GrammarCompiler


class TestLLGuidance(GrammarConformance):
    spec = SPEC


def test_calls_in_threads_agree_with_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "num_mask_threads", lambda: 2)
    threaded = SPEC.make(VOCABULARY)

    class Threaded(GrammarConformance):
        spec = SPEC

        @classmethod
        def compiler(cls) -> GrammarCompiler:
            return threaded

    Threaded().test_calls_for_many_matchers_agree_with_single_ones()
