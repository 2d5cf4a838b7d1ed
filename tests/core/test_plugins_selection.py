"""The environment variable TOKENSPEED_PLUGINS."""

from __future__ import annotations

import pytest
from made_plugins import Install, attention, discover

from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import Selection


@pytest.mark.parametrize("text", ["x,-x", "-X,other,x", "x:kernels.attention,-x:kernels.attention"])
@pytest.mark.parametrize("check", [True, False])
def test_selecting_and_excluding_a_name_is_refused(
    install: Install, text: str, check: bool
) -> None:
    install("other", attention("o"))
    found = install("x", attention("a") + "b = nowhere:SPEC [api1]\n")
    with pytest.raises(PluginError, match=r"selects and excludes x"):
        discover(found, text, check=check)


def test_selected_part_of_an_excluded_distribution_is_refused(install: Install) -> None:
    found = install("x", attention("a"))
    with pytest.raises(PluginError, match=r"x:kernels\.attention"):
        discover(found, "x:kernels.attention,-x")


def test_part_of_a_selected_distribution_may_be_excluded(install: Install) -> None:
    found = install("x", attention("a") + "b = nowhere:SPEC [api1]\n")
    assert discover(found, "x,-x:kernels.attention:a").names("kernels.attention") == ("b",)


def test_unknown_distribution_is_refused_with_the_nearest(install: Install) -> None:
    found = install("acme-kernels", attention("a"))
    with pytest.raises(PluginError, match=r"acme-kernel,.*did you mean acme-kernels\?"):
        discover(found, "acme-kernel")


@pytest.mark.parametrize("value", ["0", "false", "No", "off", ""])
def test_no_plugins_variable_can_be_off(value: str) -> None:
    assert Selection.read({"TOKENSPEED_NO_PLUGINS": value}).only is None
    assert Selection.read({"TOKENSPEED_NO_PLUGINS": "1"}).only == frozenset()
