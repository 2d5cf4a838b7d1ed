"""Starts the slowest test files first when files run in parallel, so that no process ends with a long one alone."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files with a test marked `slow` to the front, in the order in which they came."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
