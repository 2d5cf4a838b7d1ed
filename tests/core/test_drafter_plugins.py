"""Drafters of other distributions: their names and the errors of their checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_plugins import Install, discover

from tokenspeed_core.api.drafters import DraftCheckpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.drafting import DrafterChoice, find_drafter
from tokenspeed_core.errors import PluginError

MODULE = """
from tokenspeed_core.api import DrafterSpec

SPEC = DrafterSpec(load="acme_drafter:make", check="acme_drafter:check")


def check(options):
    if options:
        raise KeyError("limit")
"""


def find(install: Install, tmp_path: Path, entry: str, **flags: object) -> DrafterChoice | None:
    modules = tmp_path / "modules"
    modules.mkdir(exist_ok=True)
    (modules / "acme_drafter.py").write_text(MODULE)
    entries = f"[tokenspeed.drafters]\n{entry} = acme_drafter:SPEC [api1]\n"
    target = DraftCheckpoint(tmp_path, {}, None, None)
    wanted = Config.from_keywords(**flags).speculation()
    catalog = discover(install("acme-drafter", entries))
    return find_drafter(wanted, catalog, target, lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    "flags",
    [{"speculative_algorithm": "Acme/Last"}, {"speculative_config": {"method": "Acme/Last"}}],
)
@pytest.mark.parametrize("entry", ["Acme/Last", "acme/last"])
def test_names_may_have_capitals(
    install: Install, tmp_path: Path, entry: str, flags: dict[str, object]
) -> None:
    found = find(install, tmp_path, entry, **flags)
    assert found is not None
    assert found.entry.name == entry


def test_failing_check_of_options_names_the_plugin(install: Install, tmp_path: Path) -> None:
    wanted = {"method": "acme", "size": 1}
    with pytest.raises(PluginError, match=r"acme-drafter 1.0 failed in acme_drafter:check"):
        find(install, tmp_path, "acme", speculative_config=wanted)
