"""Every process of a server checks that it has the plugins of the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.config import Config
from tokenspeed_core.engine.messages import Failed, to_api
from tokenspeed_core.plugins import Catalog


def ended(module: str, folder: Path, digest: str) -> tuple[int, str, str]:
    """Run a process with a plugin digest; return its status, its stderr, and the failure it sent."""
    address = f"ipc://{folder}/engine"
    kind = Config if module.startswith("tokenspeed_core") else ServerConfig
    config = kind.from_keywords(device="cpu", model=str(folder / "no-model"))
    settings = {
        "config": config.to_wire(),
        "catalog_digest": digest,
        "addresses": [address],
        "replica": 0,
        "worker": 0,
        "listen_fds": [0],
    }
    read_end, write_end = os.pipe()
    os.write(write_end, json.dumps(settings).encode() + b"\n")
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, str(read_end)],
            pass_fds=(read_end,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        failed = (
            to_api.unpack(socket.recv()) if socket.poll(5000 if "engine" in module else 0) else None
        )
        return done.returncode, done.stderr, failed.message if isinstance(failed, Failed) else ""
    finally:
        socket.close(linger=0)
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("module", ["tokenspeed_core.engine.process", "tokenspeed_server.serve"])
def test_process_with_other_plugins_than_the_launcher_ends(module: str, tmp_path: Path) -> None:
    status, written, failed = ended(module, tmp_path, "another")
    assert status == 1
    assert "different plugins than its parent process" in (failed or written)
    _, written, failed = ended(module, tmp_path, Catalog.discover().digest())
    assert "different plugins" not in failed + written
    assert failed or written, "it starts with the same plugins, and fails for want of a model"
