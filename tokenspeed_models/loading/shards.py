"""Finds the weight files of a checkpoint, in one piece or in shards."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)\Z")


@dataclass(frozen=True, slots=True)
class FileKind:
    """The file names of a format: the name for an unsharded checkpoint, and glob patterns for sharded ones."""

    single: str
    patterns: tuple[str, ...]


SAFETENSORS = FileKind("model.safetensors", ("*.safetensors",))


def find_shards(path: str, kind: FileKind) -> tuple[Path, ...]:
    """Return a checkpoint's weight files, in order.

    Takes the files of an index if there is one, else the single file, else a complete set of numbered shards, else the
    only file that matches a pattern. Raises ValueError if a shard is missing, or no or several files match.
    """
    folder = Path(path)
    index = folder / f"{kind.single}.index.json"
    if index.is_file():
        return _indexed(folder, index)
    if (folder / kind.single).is_file():
        return (folder / kind.single,)
    found = sorted({file for pattern in kind.patterns for file in folder.glob(pattern)})
    shards = tuple(file for file in found if _SHARD.match(file.name))
    if shards:
        return _numbered(folder, shards)
    if len(found) == 1:
        if not found[0].is_file():
            raise ValueError(f"{found[0]} is a broken link. Copy or download the checkpoint again.")
        return tuple(found)
    if found:
        names = ", ".join(file.name for file in found)
        raise ValueError(
            f"{path} has several weight files ({names}) but no {kind.single} and no index. Remove all "
            "but one set."
        )
    raise ValueError(
        f"{path} has no weight files. Looked for: {', '.join((kind.single, *kind.patterns))}."
    )


def _indexed(folder: Path, index: Path) -> tuple[Path, ...]:
    """Return the files that an index lists."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{index} is not a weight index ({error!r}). Download it again."
        ) from error
    _require(folder, names, index.name)
    return tuple(folder / name for name in names)


def _numbered(folder: Path, shards: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return all numbered shards of the set that the first one belongs to."""
    match = _SHARD.match(shards[0].name)
    assert match is not None
    count = int(match["count"])
    names = [
        f"{match['stem']}-{index:05}-of-{count:05}{match['suffix']}"
        for index in range(1, count + 1)
    ]
    _require(folder, names, f"the name of {shards[0].name}")
    return tuple(folder / name for name in names)


def _require(folder: Path, names: list[str], source: str) -> None:
    """Raise ValueError naming the files that do not exist."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)} of the {len(names)} files in {source}. Copy or "
            "download the checkpoint again."
        )
