"""The installed wheels: plugins are usable and the demo answers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

TOKENSPEED = str(Path(sys.executable).with_name("tokenspeed"))


def test_default_distributions_are_usable() -> None:
    entries = json.loads(
        subprocess.check_output([TOKENSPEED, "plugins", "list", "--json"], text=True)
    )
    requirements = map(Requirement, requires("tokenspeed-core") or ())
    default = {
        each.name
        for each in requirements
        if each.marker is not None and each.marker.evaluate({"extra": "default"})
    }
    assert default
    assert {entry["distribution"] for entry in entries} >= default
    assert {entry["status"] for entry in entries} == {"ok"}
    assert not any(entry["origin"].startswith("editable") for entry in entries)


def test_dry_run_prints_the_plan() -> None:
    report = subprocess.check_output(
        [TOKENSPEED, "serve", "--dry-run", "--device", "cpu"], text=True, timeout=120
    )
    assert "model demo" in report
    assert "attention" in report


def test_chat_starts_a_server_and_answers() -> None:
    done = subprocess.run(
        [TOKENSPEED, "chat", "--temperature", "0", "--device", "cpu"],
        input="What is 23 + 45?\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "23 + 45 = 68" in done.stdout
