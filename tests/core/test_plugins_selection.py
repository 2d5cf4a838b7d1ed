"""What a user asks for with TOKENSPEED_PLUGINS, and how what goes without something is told."""

from __future__ import annotations

import re

import pytest
from made_plugins import Install, attention, discover

from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import Selection


@pytest.mark.parametrize(
    ("text", "wanted", "out"),
    [
        ("x,-x", "x", "x"),
        ("-X,other,x", "x", "x"),
        ("x:kernels.attention,-x", "x:kernels.attention", "x"),
        (
            "x:kernels.attention:a -x:kernels.attention",
            "x:kernels.attention:a",
            "x:kernels.attention",
        ),
        ("tokenspeed-kernels,-tokenspeed-kernels", "tokenspeed-kernels", "tokenspeed-kernels"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_what_is_both_wanted_and_taken_away_is_refused_with_both_words(
    install: Install, text: str, wanted: str, out: str, check: bool
) -> None:
    install("tokenspeed-kernels", attention("k"))
    install("other", attention("o"))
    found = install("x", attention("a") + "b = nowhere:SPEC [api1]\n")
    said = f"TOKENSPEED_PLUGINS={text} wants {wanted} and takes it away with -{out}; leave one of them out"
    with pytest.raises(PluginError, match=f"^{re.escape(said)}$"):
        discover(found, text, check=check)


def test_a_part_of_what_is_wanted_may_be_taken_away(install: Install) -> None:
    install("x-other", attention("c"))
    found = install("x", attention("a") + "b = nowhere:SPEC [api1]\n")
    for text in ("x,-x:kernels.attention:a", "x,-x-other:kernels.attention,-x:kernels.attention:a"):
        assert discover(found, text).names("kernels.attention") == ("b",)


@pytest.mark.parametrize("text", ["", "x", "x:kernels.attention:a,-other", "x,-tokenspeed-kernels"])
def test_what_goes_without_the_only_one_that_is_wanted_brings_no_other_back(
    install: Install, text: str
) -> None:
    install("tokenspeed-kernels", attention("k"))
    install("other", attention("o"))
    found = install("x", attention("a"))
    told = Selection.read({"TOKENSPEED_PLUGINS": text}).without("x")
    settled = Selection.read(dict(word.split("=", 1) for word in told.split()))
    names = () if "tokenspeed-kernels" in text else ("k",)
    assert Selection.refusal(settled, ("other",))
    assert [e.name for e in discover(found, text).all() if not settled.refusal(e.scopes)] == [
        *names
    ]
    settled.check({scope for e in discover(found).all() for scope in e.scopes})
