"""Plugins of a wheel work with only the declared dependencies."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.plugins import Catalog, Entry, Status

ENTRIES = Catalog.discover().all()


def descriptors(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def targets(descriptor: Any) -> list[str]:
    """Return the "module:attribute" texts of a descriptor, unless a module it requires is not installed."""
    if any(importlib.util.find_spec(name) is None for name in getattr(descriptor, "requires", ())):
        return []
    fields = dataclasses.fields(descriptor) if dataclasses.is_dataclass(descriptor) else ()
    texts = (getattr(descriptor, field.name) for field in fields)
    return [text for text in texts if isinstance(text, str) and re.fullmatch(r"[\w.]+:\w+", text)]


def test_wheel_provides_plugins() -> None:
    assert ENTRIES


def test_installed_code_is_tested() -> None:
    for entry in ENTRIES:
        origin = importlib.util.find_spec(entry.value.partition(":")[0])
        assert origin is not None
        assert origin.origin is not None
        assert Path(origin.origin).is_relative_to(sys.prefix)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind}:{entry.name}")
def test_every_entry_and_target_loads(entry: Entry) -> None:
    assert entry.status is Status.OK, entry.reason
    for descriptor in descriptors(Catalog([entry]).need(entry, object)):
        for target in targets(descriptor):
            module, _, attribute = target.partition(":")
            assert hasattr(import_module(module), attribute), target


def test_descriptors_load_without_a_tensor_library() -> None:
    code = (
        "import sys; from tokenspeed_core.plugins import Catalog; c = Catalog.discover(strict=True);"
        "[c.load(e, object) for e in c.all()]; print(*({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == ""
