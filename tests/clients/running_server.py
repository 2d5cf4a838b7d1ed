"""Run `tokenspeed serve` with the demo, with this repository's environment and not with that of the clients."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
CHECKPOINT = ROOT / "plugins" / "tokenspeed-demo" / "tokenspeed_demo" / "checkpoint"


@dataclass(frozen=True)
class Server:
    """The address of a running server, and a key that it accepts."""

    url: str
    key: str

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


@contextmanager
def run(folder: Path, *options: str) -> Iterator[Server]:
    """Run a server with these flags for a block."""
    key = "key-of-the-clients"
    command = [str(PYTHON), "-P", "-m", "tokenspeed_core.cli", "serve", "--port", "0"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--api-key", key, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**environ, "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1")},
        )
    assert process.stdout is not None
    try:
        found = re.search(r"at (http://\S+)", process.stdout.readline())
        assert found, (folder / "log").read_text()
        yield Server(found[1], key)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
