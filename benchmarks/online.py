"""Start `tokenspeed serve` on a shape's dummy weights and load it over HTTP; print one JSON line for each load.

    python benchmarks/online.py SHAPE [--fixed] [--loads 1x16,64x256,256x1024] [--flags="--api-key x"]

A load is USERS x REQUESTS; one user sends 128 tokens in and out, several send 256 in and 128 out. The time from
the command to `/health` is reported first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from shapes import write

HERE = Path(__file__).parent
MOST_SECONDS = 300


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_healthy(url: str, server: subprocess.Popen[bytes]) -> float:
    """Wait for `/health`; return the seconds it took. Raises RuntimeError when the server ends or hangs."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < MOST_SECONDS:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
        else:
            return time.perf_counter() - begin
    raise RuntimeError(f"the server was not healthy after {MOST_SECONDS} s")


def main() -> None:
    """Serve, load, report, stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape")
    parser.add_argument("--loads", default="1x16,64x256,256x1024")
    parser.add_argument("--fixed", action="store_true", help="all lengths equal")
    parser.add_argument("--procs", type=int, default=8)
    parser.add_argument("--flags", default="", help="more flags for serve")
    options = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "tokenspeed_core.cli", "serve", str(write(options.shape, Path(folder))),
            "--load-format", "dummy", "--port", str(port), "--log-level-http", "warning",
            "--served-model-name", "m", *shlex.split(options.flags),
        ]
        server = subprocess.Popen(command, stdout=sys.stderr)
        try:
            seconds = wait_healthy(url, server)
            print(json.dumps({"workload": "start", "shape": options.shape, "health_s": round(seconds, 2)}), flush=True)
            for load in options.loads.split(","):
                users, requests = load.split("x")
                lengths = ["128", "128"] if users == "1" else ["256", "128"]
                fixed = ["--fixed"] if options.fixed else []
                subprocess.run(
                    [sys.executable, str(HERE / "http_load.py"), url, "m", users, requests, *lengths,
                     "--procs", str(options.procs), "--label", options.shape, *fixed],
                    check=True, timeout=MOST_SECONDS,
                )
        finally:
            server.terminate()
            server.wait(timeout=60)


if __name__ == "__main__":
    main()
