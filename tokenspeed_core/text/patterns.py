"""Regular expressions that match any of many texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby


def any_of(texts: Iterable[str]) -> str:
    """Return a trie-shaped pattern that matches any of the sorted texts, and the shortest if several match."""
    groups = [
        (first, [text[1:] for text in group])
        for first, group in groupby(texts, key=lambda text: text[:1])
    ]
    if groups and not groups[0][0]:
        return ""
    return "(?:" + "|".join(re.escape(first) + any_of(rest) for first, rest in groups) + ")"
