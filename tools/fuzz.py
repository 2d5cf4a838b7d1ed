"""Runs schemathesis against the server's own OpenAPI description; any 5xx is a failure.

    python tools/fuzz.py                      # starts `tokenspeed serve` with the demo model
    python tools/fuzz.py http://127.0.0.1:8000 --examples 200

No route is left out. Valid and invalid requests are generated from the schema.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESS = re.compile(r"https?://[\w.:\[\]-]+")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("url", nargs="?", help="a running server; default: a new one of the demo")
    parser.add_argument("--examples", type=int, default=50, help="per route and phase")
    parser.add_argument("--mode", choices=("negative", "positive", "all"), default="all")
    parser.add_argument("--phases", default="fuzzing,coverage")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


@contextmanager
def demo() -> Iterator[str]:
    """Run a server of the demo model; yield its URL."""
    command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--max-model-len", "64"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server ended with status {process.wait()}")
            found = ADDRESS.search(line)
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def fuzz(url: str, arguments: argparse.Namespace) -> int:
    """Run schemathesis; return its exit status."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
        *("--mode", arguments.mode, "--phases", arguments.phases),
        *("--max-examples", str(arguments.examples), "--seed", str(arguments.seed)),
        *("--generation-database", "none", "--request-timeout", "60", "--no-color"),
    ]
    with tempfile.TemporaryDirectory() as folder:  # schemathesis writes its reports there
        return subprocess.run(command, cwd=folder, env=os.environ, check=False).returncode


def main(words: list[str] | None = None) -> int:
    """Run; return the exit status."""
    arguments = parse_arguments(words)
    if arguments.url is not None:
        return fuzz(arguments.url, arguments)
    with demo() as url:
        return fuzz(url, arguments)


if __name__ == "__main__":
    sys.exit(main())
