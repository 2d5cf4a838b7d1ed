"""The demo model: a checkpoint, and the program that scores it."""

from __future__ import annotations

from pathlib import Path

from tokenspeed_core.api import Checkpoint

__all__ = ["CHECKPOINT"]

CHECKPOINT = Checkpoint(
    name="demo",
    path=str(Path(__file__).resolve().parent / "checkpoint"),
    description="A 5M-parameter Qwen3 chat model: sums, tool calls, extraction, copying and editing text.",
)
