"""CPU kernels in torch and NumPy, for ops with a slow reference."""

from __future__ import annotations

__all__: list[str] = []
