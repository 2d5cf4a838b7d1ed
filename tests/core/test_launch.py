"""Starting an engine where something that it stands on is not installed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tokenspeed_core.engine import launch
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.plugins.hooks import Hooks


def test_without_torch_a_start_ends_in_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch, which is not installed: `pip install 'tokenspeed-core\[default\]'`"):
        launch.start(cast(Any, None), cast(Any, None), Hooks(), lambda stage, done, total: None)
