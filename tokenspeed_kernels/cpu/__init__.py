"""Kernels for CPUs, in plain torch, where the reference is needlessly slow."""

from __future__ import annotations

__all__: list[str] = []
