"""Who may say which backend is the fastest: the default distributions, never the plugin that is ranked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenspeed_core.errors import PluginError
from tokenspeed_core.kernels.installed import installed_rankings
from tokenspeed_core.kernels.spec import Ranking
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status

RANKINGS = (Ranking("attention", "decode", (9, 0), (("fast", "1.1 times the floor"),)),)
OWN = Entry(
    "rankings", "measured", f"{__name__}:RANKINGS", 1, "tokenspeed-kernels", "1.0", "installed", "", Status.OK, ""
)
FOREIGN = replace(OWN, name="mine", distribution="fast-kernels")


def catalog_of(monkeypatch: pytest.MonkeyPatch, *entries: Entry, strict: bool = False) -> Catalog:
    monkeypatch.setattr("tokenspeed_core.plugins.catalog._import", lambda entry, expected: RANKINGS)
    return Catalog(entries, strict=strict)


def test_the_own_rankings_are_taken_and_a_plugins_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catalog = catalog_of(monkeypatch, OWN, FOREIGN)
    assert installed_rankings(catalog) == RANKINGS
    assert {entry.name: entry.status for entry in catalog.all()} == {"measured": Status.OK, "mine": Status.FAILED}
    assert "say which backend comes first" in catalog.all()[1].reason


def test_under_strict_plugins_a_plugin_that_ranks_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="only the default distributions"):
        installed_rankings(catalog_of(monkeypatch, FOREIGN, strict=True))
