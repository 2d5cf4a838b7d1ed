"""Portable Triton kernels: no autotuning; few variants by shape, all compiled while a server warms up."""

from __future__ import annotations

__all__: list[str] = []
