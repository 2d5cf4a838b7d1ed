"""The descriptor of the grammar backend XGrammar."""

from __future__ import annotations

from tokenspeed_core.api import GrammarSpec

__all__ = ["SPEC"]

SPEC = GrammarSpec("tokenspeed_grammars_xgrammar.backend:XGrammar")
