"""Editable installs whose metadata is older than their project: pip writes entry points once, when it installs."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from tokenspeed_core.commands import normalise
from tokenspeed_plugin_tools.installed import GROUP, Finding, editable_folder

Points = dict[tuple[str, str], str]  # kind and name: value


def of_editables(distributions: Iterable[Distribution]) -> Iterator[Finding]:
    """Yield those whose pyproject.toml names other plugins than were installed, whether or not any were.

    A project that leaves its entry points to its build tool is passed over: what they are is not written there.
    """
    seen: set[Path] = set()
    for each in distributions:
        try:
            folder, installed = _project(each), _installed(each)
            name, version = normalise(each.metadata["Name"]), each.metadata["Version"]
        except (
            Exception
        ):  # metadata may be anything at all; that it cannot be read is a finding of its own
            continue
        if folder is None or folder in seen:
            continue
        seen.add(folder)
        file = folder / "pyproject.toml"
        again = f"pip install -e {shlex.quote(str(folder))}"
        try:
            written = _written(file)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            if installed:
                what = f"whether it is installed as {file} has it is unknown: {type(error).__name__}: {error}"
                yield Finding(name, version, what, f"mend that file, then {again}", is_note=True)
            continue
        if written is not None and written != installed:
            what = f"its installation is older than {file}: {_difference(installed, written)}"
            yield Finding(name, version, what, again)


def _project(distribution: Distribution) -> Path | None:
    """Return the folder of the project that an editable install, of pip's or of setup.py develop's, points at."""
    folder = editable_folder(distribution)
    if (
        folder is None and distribution.read_text("METADATA") is None
    ):  # an .egg-info, beside the code or in src
        root = Path(str(distribution.locate_file("")))
        folder = next(
            (each for each in (root, root.parent) if (each / "pyproject.toml").is_file()), None
        )
    return None if folder is None else folder.resolve()


def _installed(distribution: Distribution) -> Points:
    points = (point for point in distribution.entry_points if point.group.startswith(GROUP))
    return {(point.group.removeprefix(GROUP), point.name): _bare(point.value) for point in points}


def _written(file: Path) -> Points | None:
    """Return the plugins that a pyproject.toml names, None where it does not say.

    Raises OSError, ValueError, TypeError or AttributeError for a file that cannot be read as one.
    """
    if not file.exists():
        return None
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project")
    if project is None or "entry-points" in project.get("dynamic", ()):
        return None
    return {
        (group.removeprefix(GROUP), name): _bare(value)
        for group, points in project.get("entry-points", {}).items()
        if group.startswith(GROUP)
        for name, value in points.items()
    }


def _bare(value: str) -> str:
    return "".join(value.split())


def _difference(installed: Points, written: Points) -> str:
    kinds = {
        "not installed": written.keys() - installed.keys(),
        "not there any more": installed.keys() - written.keys(),
        "changed": {
            key for key in installed.keys() & written.keys() if installed[key] != written[key]
        },
    }
    return "; ".join(
        f"{', '.join(' '.join(key) for key in sorted(keys))} {'are' if len(keys) > 1 else 'is'} {what}"
        for what, keys in kinds.items()
        if keys
    )
