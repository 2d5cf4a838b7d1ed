"""Names of linear layers in `quantization_config`: exact names, wildcards and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import cache


def matcher(names: Iterable[str] | None) -> Callable[[str], bool]:
    """Return a function that says whether a layer's name matches any of `names`.

    A name matches the module itself and all below it; it may contain wildcards, or be a regular expression after "re:".
    Raises ValueError for an invalid one.
    """
    patterns = [_pattern(name) for name in names or ()]
    return lambda layer: any(pattern.match(layer) for pattern in patterns)


# Checkpoints may list hundreds of names, more than the cache of `re` holds.
@cache
def _pattern(name: str) -> re.Pattern[str]:
    if not name.startswith("re:"):
        return re.compile(rf"{translate(name)}|{re.escape(name)}\.")
    try:
        return re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"invalid regular expression {name!r}: {error}") from error
