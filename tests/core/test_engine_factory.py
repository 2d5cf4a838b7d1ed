"""The number of API workers, and the check that torch is installed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tokenspeed_core.engine import environment
from tokenspeed_core.engine.factory import start
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.plugins.hooks import Hooks


def test_missing_torch_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"tokenspeed-core\[default\]",
    ):
        start(cast(Any, None), cast(Any, None), Hooks(), lambda stage, done, total: None)
