"""A folder of plugins on `sys.path`, and commands that must be refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_site import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Put a folder first on `sys.path`; unload its modules afterwards."""
    monkeypatch.delenv("TOKENSPEED_PLUGINS", raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    for module in set(sys.modules) - before:
        origin = getattr(sys.modules[module], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[module]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with one line, and return the line."""
    from tokenspeed_core.cli import main

    def run(*words: str) -> str:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("tokenspeed: ").strip()

    return run
