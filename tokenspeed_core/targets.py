"""Loads targets: objects named by "module:attribute", which are imported only when they are needed."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any


def load_target(target: str) -> Any:
    """Import "module:attribute" and return the attribute, or "module" and return the module.

    The attribute may contain dots. Raises the import's exceptions, and AttributeError.
    """
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    return reduce(getattr, filter(None, attribute.split(".")), found)
