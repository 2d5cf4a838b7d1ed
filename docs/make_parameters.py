"""Write docs/parameters.md from the configuration."""

from __future__ import annotations

from pathlib import Path

from tokenspeed_core.config.describe import page

if __name__ == "__main__":
    Path(__file__).with_name("parameters.md").write_text(page(), encoding="utf-8")
