"""What a user gets from the wheels: the plugins are there, and the demo answers in a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

TOKENSPEED = str(Path(sys.executable).with_name("tokenspeed"))


def test_the_default_distributions_are_installed_and_usable() -> None:
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


def test_a_dry_run_says_what_would_run() -> None:
    report = subprocess.check_output(
        [TOKENSPEED, "serve", "--dry-run", "--device", "cpu"], text=True, timeout=120
    )
    assert "model demo" in report
    assert "attention" in report


def test_the_demo_adds_in_a_chat_that_starts_its_own_server() -> None:
    done = subprocess.run(
        [TOKENSPEED, "chat", "--temperature", "0", "--device", "cpu"],
        input="What is 23 + 45?\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "23 + 45 = 68" in done.stdout
