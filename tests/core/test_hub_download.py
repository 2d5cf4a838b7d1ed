"""Downloads from a fake hub, each in a separate process."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from tokenspeed_core.checkpoint.hub import download
from tokenspeed_core.errors import CapacityError

SCRIPT = """
import sys
from tokenspeed_core.errors import TokenSpeedError
from tokenspeed_core.checkpoint.hub import download
try:
    print(download(sys.argv[1], sys.argv[2] or None, sys.argv[3], lambda names: [n for n in names if "/" not in n]))
except TokenSpeedError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
MAIN, OLD = "a" * 40, "b" * 40


@dataclass
class Hub:
    """A hub with one repository, `maker/tiny`, at two revisions. It records the files it sent."""

    url: str = ""
    revisions: dict[str, str] = field(
        default_factory=lambda: {"main": MAIN, "v0": OLD, MAIN: MAIN, OLD: OLD}
    )
    files: dict[str, dict[str, bytes]] = field(
        default_factory=lambda: {
            MAIN: {
                "config.json": b'{"a": 1}',
                "one.safetensors": b"1" * 5000,
                "two.safetensors": b"2" * 5000,
                "original/copy.pth": b"0" * 100,
            },
            OLD: {"config.json": b'{"a": 0}'},
        }
    )
    fetched: list[str] = field(default_factory=list)
    stalls_at: str | None = None  # a file of which it sends only the first half
    drops_once: str | None = None  # a file during which it closes the connection once
    stalled: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""

    def _answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo, rest = (parts[2:4], parts[4:]) if is_api else (parts[:2], parts[2:])
        commit = self.hub.revisions.get(rest[1]) if len(rest) > 1 else MAIN
        if repo != ["maker", "tiny"]:
            self._refuse("RepoNotFound")
        elif commit is None:
            self._refuse("RevisionNotFound")
        elif is_api:
            names = [{"rfilename": name} for name in self.hub.files[commit]]
            self._send(
                200,
                json.dumps({"id": "maker/tiny", "sha": commit, "siblings": names}).encode(),
                {},
                "",
            )
        elif rest[2] not in self.hub.files[commit]:
            self._refuse("EntryNotFound")
        else:
            content = self.hub.files[commit][rest[2]]
            tags = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            self._file(rest[2], content, tags, with_body)

    def _file(self, name: str, content: bytes, tags: dict[str, str], with_body: bool) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if with_body:
            self.hub.fetched.append(name if not start else f"{name} from {start}")
        self._send(206 if start else 200, content[start:], tags, name if with_body else None)

    def _refuse(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code}, "")

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str | None) -> None:
        """Send a response; `name` is a file name, empty for other bodies, None for no body."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if name is None:
            return
        if name and name in (self.hub.stalls_at, self.hub.drops_once):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if name == self.hub.stalls_at:
                self.hub.stalled.set()
                self.hub.goes_on.wait()
            self.hub.drops_once = None
            self.close_connection = True
            return
        self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    state.goes_on.set()
    server.shutdown()
    server.server_close()


def start(
    url: str,
    folder: Path,
    repo: str = "maker/tiny",
    revision: str = "",
    script: str = "",
    **env: str,
) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        **env,
    }
    words = (
        [script, str(folder / "cache")]
        if script
        else [SCRIPT, repo, revision, str(folder / "cache")]
    )
    return subprocess.Popen(
        [sys.executable, "-c", *words],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(
    url: str, folder: Path, repo: str = "maker/tiny", revision: str = "", **env: str
) -> tuple[int, str, str]:
    process = start(url, folder, repo, revision, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out.strip(), err.strip()


def test_repository_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert Path(out, "two.safetensors").read_bytes() == b"2" * 5000
    assert hub.fetched == ["config.json", "one.safetensors", "two.safetensors"]
    hub.fetched.clear()
    assert run(hub.url, tmp_path)[:2] == (0, out)
    assert hub.fetched == []
    assert run("http://127.0.0.1:9", tmp_path)[:2] == (0, out), "the cache works without a network"
    assert run(hub.url, tmp_path, HF_HUB_OFFLINE="1")[:2] == (0, out)


DRY_RUN = """
import sys
from importlib.metadata import distributions
from tokenspeed_core.checkpoint.resolve import choose_format, resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.plugins import Catalog, Selection
catalog = Catalog.discover(Selection.read({}), distributions=distributions(path=[sys.path[-1]]))
found = resolve_checkpoint(Config(model="maker/tiny", download_dir=sys.argv[1]), catalog, with_weights=False)
print(choose_format(found.files, "auto", catalog, found.path).name, found.info.vocab_size)
"""
FAMILY = """
from tokenspeed_core.api import FullAttention, LoadFormat, ModelInfo, ModelSpec
def describe(config):
    return ModelInfo("Tiny", config["vocab_size"], 8, "float32", 1, 1, (FullAttention("full", 1, 1, 4),), (2,), None)
TINY = ModelSpec("Tiny", "tiny_family:describe", "tiny_family:Tiny")
SAFE = LoadFormat("safetensors", "tiny_family:read", ("*.safetensors",))
"""


def test_dry_run_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "tiny_family-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "tiny_family.py").write_text(FAMILY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tokenspeed.models]\nTiny = tiny_family:TINY [api1]\n"
        "[tokenspeed.load_formats]\nsafetensors = tiny_family:SAFE [api1]\n"
    )
    hub.files[MAIN] |= {
        "config.json": b'{"architectures": ["Tiny"], "vocab_size": 7}',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
    }
    process = start(
        hub.url, tmp_path, script=f"import sys; sys.path.append({str(site)!r})\n{DRY_RUN}"
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.strip()) == (0, "safetensors 7"), err
    assert sorted(hub.fetched) == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_revision_selects_the_files(hub: Hub, tmp_path: Path) -> None:
    code, out, err = run(hub.url, tmp_path, revision="v0")
    assert code == 0, err
    assert json.loads(Path(out, "config.json").read_text()) == {"a": 0}
    code, _, err = run(hub.url, tmp_path, revision="v7")
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("CheckpointError: maker/tiny has no revision 'v7'")


def test_ctrl_c_stops_a_download_and_keeps_complete_files(hub: Hub, tmp_path: Path) -> None:
    hub.stalls_at = "two.safetensors"
    process = start(hub.url, tmp_path)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "run the same command" in err
    hub.stalls_at = None
    hub.fetched.clear()
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert hub.fetched == ["two.safetensors"]
    assert Path(out, "two.safetensors").read_bytes() == b"2" * 5000


def test_killed_download_can_continue(hub: Hub, tmp_path: Path) -> None:
    hub.stalls_at = "one.safetensors"
    process = start(hub.url, tmp_path)
    assert hub.stalled.wait(60)
    process.kill()
    process.communicate(timeout=60)
    hub.stalls_at = None
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert Path(out, "one.safetensors").read_bytes() == b"1" * 5000


def test_lost_connection_is_retried(hub: Hub, tmp_path: Path) -> None:
    hub.drops_once = "one.safetensors"
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert len(hub.fetched) == 4
    assert hub.fetched[2].startswith("one.safetensors")
    assert Path(out, "one.safetensors").read_bytes() == b"1" * 5000


def test_unknown_repository_is_refused(hub: Hub, tmp_path: Path) -> None:
    code, _, err = run(hub.url, tmp_path, repo="maker/tinny")
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("CheckpointError: ")
    assert "maker/tinny" in line


def test_repository_without_config_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files[MAIN]["config.json"]
    code, _, err = run(hub.url, tmp_path)
    assert (code, err) == (1, "CheckpointError: maker/tiny has no config.json")


def test_no_network_and_no_cache_is_refused(tmp_path: Path) -> None:
    code, _, err = run("http://127.0.0.1:9", tmp_path)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("CheckpointError: maker/tiny is not in the cache")
    code, _, offline = run("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert (code, offline) == (1, err)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("Data processing error: No space left on device")]
)
def test_full_disk_names_the_folder(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **keywords: object) -> str:
        raise error

    listing = SimpleNamespace(siblings=[])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *arguments, **keywords: listing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(CapacityError, match=r"maker/tiny: .* GB free at (.|\s)*--download-dir"):
        download("maker/tiny", None, str(tmp_path), list)
