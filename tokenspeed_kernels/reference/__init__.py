"""Reference implementation of every op in plain torch: its definition, the fallback, and the oracle of the tests."""

from __future__ import annotations

__all__: list[str] = []
