"""A plugin broken in each way: what a user reads is what docs/broken-plugins.md shows."""

from __future__ import annotations

import re

import make_broken_plugins
import pytest

pytestmark = pytest.mark.tree
SHOWN = re.split(r"^(?=## )", make_broken_plugins.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Break the plugin in every way; return what is said, by the title of the way."""
    return {text.partition("\n")[0]: text.strip() for text in make_broken_plugins.sections()}


@pytest.mark.parametrize("shown", SHOWN[1:], ids=lambda text: text.partition("\n")[0].removeprefix("## "))
def test_a_user_reads_what_the_page_shows(said: dict[str, str], shown: str) -> None:
    assert said[shown.partition("\n")[0]] == shown.strip(), "run python docs/make_broken_plugins.py"


def test_the_page_shows_every_way_and_no_other(said: dict[str, str]) -> None:
    assert [text.partition("\n")[0] for text in SHOWN[1:]] == list(said)
    assert SHOWN[0].strip() == make_broken_plugins.HEAD.strip()


def test_no_start_ends_with_a_traceback_where_a_plugin_was_asked_for_by_name(said: dict[str, str]) -> None:
    named = [part for text in said.values() for part in text.split("$ tokenspeed ") if "--attention-backend" in part]
    ends = [part for part in named if "# exit status 2" in part.partition("\n")[0]]
    assert len(ends) >= 9
    assert all(re.search(r"^tokenspeed: .*acme/flash", part, re.MULTILINE) for part in ends)
