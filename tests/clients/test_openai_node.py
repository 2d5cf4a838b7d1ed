"""OpenAI's client for Node: `node/calls.mjs` makes the calls, and each is a test."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from running_server import Server

HOME = Path(__file__).parent / "node"
CLIENT = "openai for Node"
VERSION = json.loads((HOME / "package.json").read_text())["dependencies"]["openai"]
NAMES = re.findall(r"^  async (\w+)\(\)", (HOME / "calls.mjs").read_text(), re.MULTILINE)
REFUSED = {
    "refused_image": "images: the demo reads text only",
    "refused_embeddings": "embeddings: there is no embedding model",
}
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture(scope="module")
def outcome(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Install the client, make all calls, and return the error of each, or None."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "calls.mjs"):
        shutil.copy(HOME / name, folder)
    quiet = ["--no-audit", "--no-fund", "--loglevel", "error"]
    subprocess.run(["npm", "install", *quiet], cwd=folder, check=True, timeout=200)
    done = subprocess.run(
        ["node", "calls.mjs", server.v1, server.key],
        cwd=folder,
        check=True,
        timeout=200,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.refused(REFUSED[name])] if name in REFUSED else [])
        for name in NAMES
    ],
)
def test_call(outcome: dict[str, str | None], name: str) -> None:
    error = outcome[name]
    assert error is None, error
