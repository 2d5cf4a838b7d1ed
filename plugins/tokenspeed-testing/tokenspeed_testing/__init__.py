"""The conformance kit, for the authors of plugins. Its modules import torch where they need it; the core does not.

`distribution`, `kernel`, `model`, `parser` and `policy` have a class each to inherit, whose questions are tests;
`verdicts` asks them of what is installed. Stable as `tokenspeed_core.api` is: docs/contract.json holds their
signatures. The other modules are what these are made of: provisional, and whatever changes a signature there raises
`TESTING_API`.
"""

from __future__ import annotations

TESTING_API = 5

__all__ = ["TESTING_API"]
