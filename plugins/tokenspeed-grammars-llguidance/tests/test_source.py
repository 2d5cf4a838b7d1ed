"""The conversion of grammars to llguidance's formats."""

from __future__ import annotations

import pytest
from tokenspeed_grammars_llguidance.source import ascii_classes


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\w-]\w", "[0-9A-Za-z_-][0-9A-Za-z_]"),
        (r"\\d\[\d\]", r"\\d\[[0-9]\]"),
        (r"[^\d\]]\W", r"[^0-9\]]\W"),
        ("a.b", "a.b"),
    ],
)
def test_digits_and_word_characters_are_ascii(regex: str, expected: str) -> None:
    assert ascii_classes(regex) == expected
