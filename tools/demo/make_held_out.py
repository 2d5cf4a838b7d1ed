"""Write the held-out items of the demo model: `python tools/demo/make_held_out.py`."""

from __future__ import annotations

from demo_training.tasks import SCORED, generate_held_out
from tokenspeed_demo.items import PATH, dump


def content() -> bytes:
    """Return the file's content."""
    return dump({task: generate_held_out(task) for task in SCORED})


if __name__ == "__main__":
    PATH.write_bytes(content())
