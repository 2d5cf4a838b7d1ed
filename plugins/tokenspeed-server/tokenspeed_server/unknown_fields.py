"""Fields of a request that this server does not know: found at any depth, then ignored or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel

from tokenspeed_core.commands.serving import BadRequestError

Policy = Literal["warn", "error", "ignore"]
Place = tuple["Place", str | int] | None
"""Where a field is: the place above it, and its name or its index. None: the body."""
Extra = tuple[Place, str, Collection[str]]
"""An unknown field: its place, its name, and the names that are known there."""
HEADER = b"x-tokenspeed-ignored-fields"

TYPO_SIMILARITY = 0.82  # of names without case and underscores, as a difflib ratio
MAX_NAME = 64  # characters of a name that messages and the header show
MAX_UNKNOWN = 32  # unknown paths in a request: each is compared with all known names
MAX_NAMES = 32  # names in a header
MAX_REMEMBERED = 1024  # names that are logged once

_INDEX = re.compile(r"\[\d+\]")

log = logging.getLogger("tokenspeed.requests")


def check_unknown(found: Iterable[Extra], policy: Policy) -> list[str]:
    """Return the paths of unknown fields to name to the client, such as `messages[].id`.

    Raises BadRequestError for a name that is close to a known one, for any under the policy "error",
    and for more than `MAX_UNKNOWN` paths.
    """
    if policy == "ignore":
        return []
    paths: dict[str, None] = {}
    for place, name, known in found:
        path = _path((place, name[:MAX_NAME]))
        general = _INDEX.sub("[]", path)
        if general in paths:
            continue
        near = _nearest(name, known)
        if near or policy == "error":
            hint = f"; did you mean {near}?" if near else ""
            raise BadRequestError(f"unknown field {path!r}{hint}", path, "unknown_field")
        if len(paths) == MAX_UNKNOWN:
            raise BadRequestError(
                f"more than {MAX_UNKNOWN} different unknown fields, such as {path!r}",
                path,
                "unknown_field",
            )
        paths[general] = None
    return list(paths)


def extra_fields(value: BaseModel, place: Place = None) -> Iterator[Extra]:
    """Yield the unknown fields of a validated model and of the models in it, all of which allow extra fields."""
    for name in value.__pydantic_extra__ or ():
        yield place, name, type(value).model_fields
    for name, part in vars(value).items():
        if isinstance(part, list):
            if part and isinstance(part[0], BaseModel):
                parent = (place, name)
                for index, item in enumerate(part):
                    yield from extra_fields(item, (parent, index))
        elif isinstance(part, BaseModel):
            yield from extra_fields(part, (place, name))


def _path(place: Place) -> str:
    """Return a place as text, such as `messages[0].id`."""
    if place is None:
        return ""
    parent, step = place
    above = _path(parent)
    if isinstance(step, int):
        return f"{above}[{step}]"
    return f"{above}.{step}" if above else step


def header(names: Iterable[str]) -> tuple[bytes, bytes]:
    """Return the response header that names ignored fields."""
    # A header's value may not end with the space after a comma, so an empty name has quotes.
    shown = [quote(name, safe="[]._-") or '""' for name in list(names)[:MAX_NAMES]]
    return HEADER, ", ".join(shown).encode("ascii")


class IgnoredFieldsLog:
    """Logs each ignored field once, so that a client in a loop does not fill the log."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the names that were not logged before."""
        new = [name for name in names if name not in self._seen]
        if not new or len(self._seen) >= MAX_REMEMBERED:
            return
        self._seen.update(new)
        log.warning(
            "ignored unknown or unused request fields (logged once): %s. Responses list them in %s",
            ", ".join(map(repr, new[:MAX_NAMES])),
            HEADER.decode(),
        )


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` is probably a typo of."""
    plain: dict[str, Any] = {_plain(each): each for each in known}
    near = get_close_matches(_plain(name[:MAX_NAME]), plain, n=1, cutoff=TYPO_SIMILARITY)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
