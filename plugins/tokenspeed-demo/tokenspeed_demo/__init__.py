"""The demo models: two checkpoints, a draft head, and the program that scores them."""

from __future__ import annotations

from pathlib import Path

from tokenspeed_core.api import Checkpoint

__all__ = ["CHECKPOINT", "DEEPSEEK", "EAGLE3"]

_FOLDER = Path(__file__).resolve().parent

CHECKPOINT = Checkpoint(
    name="demo",
    path=str(_FOLDER / "checkpoint"),
    description="A 5M-parameter Qwen3 chat model: sums, tool calls, extraction, copying and editing text.",
)
DEEPSEEK = Checkpoint(
    name="demo-deepseek",
    path=str(_FOLDER / "checkpoint_deepseek"),
    description="A 7M-parameter DeepSeek-V3 chat model with the demo's tasks: latent attention, 16 experts.",
)
EAGLE3 = Checkpoint(
    name="demo-eagle3",
    path=str(_FOLDER / "checkpoint_eagle3"),
    description="An EAGLE-3 draft head of 1.4M parameters for the demo model.",
)
