"""CPU kernels in plain torch, for ops with a slow reference."""

from __future__ import annotations

__all__: list[str] = []
