"""Every op in plain torch: its meaning, what runs where nothing better does, and the oracle of tests."""

from __future__ import annotations

__all__: list[str] = []
