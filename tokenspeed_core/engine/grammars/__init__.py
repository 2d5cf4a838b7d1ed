"""Structured output: grammars are compiled in a bounded pool, and mask the tokens of their sequences.

The engine uses `Grammars` only. Grammars come from users, so each is first compiled in a subprocess with limits of time
and memory (`trial`), and only then in this process (`pool`).
"""

from __future__ import annotations

from tokenspeed_core.engine.grammars.backend import GrammarBackend, find_backend
from tokenspeed_core.engine.grammars.service import Grammars

__all__ = ["GrammarBackend", "Grammars", "find_backend"]
