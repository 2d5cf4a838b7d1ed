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


def part_matcher(names: Iterable[str] | None) -> Callable[[str], bool]:
    """Return a function that says whether a layer is one of the modules `names`, or inside one.

    A name may be the end of a layer's name, or whole parts of it between dots. It may be a regular expression for the
    start of a layer's name. Raises ValueError for an invalid one.
    """
    patterns = [compiled(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names or ()]
    parts = [f".{name.strip('.')}." for name in names or ()]
    endings = tuple(names or ())

    def is_match(layer: str) -> bool:
        return (
            layer.endswith(endings)
            or any(part in f".{layer}." for part in parts)
            or any(pattern.match(layer) for pattern in patterns)
        )

    return is_match


# Checkpoints may list hundreds of names, more than the cache of `re` holds.
@cache
def _pattern(name: str) -> re.Pattern[str]:
    if not name.startswith("re:"):
        return re.compile(rf"{translate(name)}|{re.escape(name)}\.")
    return compiled(name.removeprefix("re:"))


@cache
def compiled(expression: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises ValueError for an invalid one."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"invalid regular expression {expression!r}: {error}") from error
