"""The conformance kit: any kernel against its op's reference. Its modules import torch; the core does not."""

from __future__ import annotations

__all__: list[str] = []
