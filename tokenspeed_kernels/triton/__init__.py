"""Portable Triton kernels, one folder per op family.

Tilings are fixed by shape, not autotuned: all variants are compiled while the server warms up.
"""

from __future__ import annotations

__all__: list[str] = []
