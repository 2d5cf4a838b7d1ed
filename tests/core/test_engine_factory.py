"""The number of API workers, and the check that torch is installed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tokenspeed_core.config import Config
from tokenspeed_core.engine import factory as launch
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.plugins.hooks import Hooks


def test_start_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"tokenspeed-core\[default\]",
    ):
        launch.start(cast(Any, None), cast(Any, None), Hooks(), lambda stage, done, total: None)


@pytest.mark.parametrize(
    ("num_processors", "asked", "expected"),
    [(16, None, 2), (15, None, 1), (1, None, 1), (256, None, 2), (64, 1, 1), (2, 3, 3)],
)
def test_default_number_of_api_workers(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, asked: int | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_processors)))
    assert launch.num_workers(Config.from_keywords(api_workers=asked)) == expected
