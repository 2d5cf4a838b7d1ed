"""A plugin broken in each way: what a user reads is what docs/broken-plugins.md shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import make_broken_plugins
import pytest

pytestmark = pytest.mark.tree
HEAD, *SHOWN = re.split(
    r"^(?=## )", make_broken_plugins.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE
)


def title(shown: str) -> str:
    return shown.partition("\n")[0].removeprefix("## ")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return what breaks the plugin in the way with this title, once, and returns what is said."""
    sections = make_broken_plugins.sections(
        make_broken_plugins.wheel(tmp_path_factory.mktemp("acme"))
    )
    return cache(lambda title: sections[title]().strip())


@pytest.mark.release
@pytest.mark.parametrize("shown", SHOWN, ids=title)
def test_a_user_reads_what_the_page_shows(said: Callable[[str], str], shown: str) -> None:
    assert said(title(shown)) == shown.strip(), "run python docs/make_broken_plugins.py"


def test_the_page_shows_every_way_and_no_other() -> None:
    assert list(map(title, SHOWN)) == list(make_broken_plugins.sections(Path()))
    assert HEAD.strip() == make_broken_plugins.HEAD.strip()


def test_no_start_ends_with_a_traceback_where_a_plugin_was_asked_for_by_name() -> None:
    named = [
        part
        for text in SHOWN
        for part in text.split("$ tokenspeed ")
        if "--attention-backend" in part
    ]
    ends = [part for part in named if "# exit status 2" in part.partition("\n")[0]]
    assert len(ends) >= 9
    assert all(re.search(r"^tokenspeed: .*acme/flash", part, re.MULTILINE) for part in ends)
