"""Downloads from a server that speaks the hub's protocol, each by a process of its own, as a user's would be."""

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
    """A hub with one repository, `maker/tiny`, at two revisions. It notes what was fetched."""

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
    stalls_at: str | None = None  # a file whose second half never comes
    drops_once: str | None = None  # a file whose connection ends at the half, once
    stalled: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Keep quiet."""

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
        """Send an answer; `name` is the file's, empty for other bodies, None for no body."""
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


def test_a_repository_is_downloaded_once_and_then_taken_from_the_cache(
    hub: Hub, tmp_path: Path
) -> None:
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert Path(out, "two.safetensors").read_bytes() == b"2" * 5000
    assert hub.fetched == ["config.json", "one.safetensors", "two.safetensors"]
    hub.fetched.clear()
    assert run(hub.url, tmp_path)[:2] == (0, out)
    assert hub.fetched == []
    assert run("http://127.0.0.1:9", tmp_path)[:2] == (0, out), (
        "the network is gone, the cache is not"
    )
    assert run(hub.url, tmp_path, HF_HUB_OFFLINE="1")[:2] == (0, out)


DRY_RUN = """
import sys
from importlib.metadata import distributions
from tokenspeed_core.checkpoint.resolve import choose_format, resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.plugins import Catalog, Selection
catalog = Catalog.discover(Selection.read({}), distributions=distributions(path=[sys.path[-1]]))
found = resolve_checkpoint(Config(model="maker/tiny", download_dir=sys.argv[1]), catalog, with_weights=False)
print(choose_format(found.files, "auto", catalog).name, found.info.vocab_size)
"""
FAMILY = """
from tokenspeed_core.api import FullAttention, LoadFormat, ModelInfo, ModelSpec
def describe(config):
    return ModelInfo("Tiny", config["vocab_size"], 8, "float32", 1, 1, (FullAttention("full", 1, 1, 4),), (2,), None)
TINY = ModelSpec("Tiny", "tiny_family:describe", "tiny_family:Tiny")
SAFE = LoadFormat("safetensors", "tiny_family:read", ("*.safetensors",))
"""


def test_a_dry_run_downloads_what_describes_a_model_and_none_of_its_weights(
    hub: Hub, tmp_path: Path
) -> None:
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


def test_a_revision_is_what_was_asked_for(hub: Hub, tmp_path: Path) -> None:
    code, out, err = run(hub.url, tmp_path, revision="v0")
    assert code == 0, err
    assert json.loads(Path(out, "config.json").read_text()) == {"a": 0}
    code, _, err = run(hub.url, tmp_path, revision="v7")
    assert code == 1
    assert err.splitlines() == [
        "CheckpointError: maker/tiny has no revision 'v7'; --revision is a branch, tag or commit"
    ]


def test_ctrl_c_ends_a_download_at_once_and_the_next_one_keeps_what_is_complete(
    hub: Hub, tmp_path: Path
) -> None:
    hub.stalls_at = "two.safetensors"
    process = start(hub.url, tmp_path)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "the same command goes on after the files that are complete" in err
    hub.stalls_at = None
    hub.fetched.clear()
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert hub.fetched == ["two.safetensors"]
    assert Path(out, "two.safetensors").read_bytes() == b"2" * 5000


def test_a_killed_download_is_taken_up_by_the_next(hub: Hub, tmp_path: Path) -> None:
    hub.stalls_at = "one.safetensors"
    process = start(hub.url, tmp_path)
    assert hub.stalled.wait(60)
    process.kill()
    process.communicate(timeout=60)
    hub.stalls_at = None
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert Path(out, "one.safetensors").read_bytes() == b"1" * 5000


def test_a_connection_that_breaks_once_is_made_again(hub: Hub, tmp_path: Path) -> None:
    hub.drops_once = "one.safetensors"
    code, out, err = run(hub.url, tmp_path)
    assert code == 0, err
    assert len(hub.fetched) == 4
    assert hub.fetched[2].startswith("one.safetensors")
    assert Path(out, "one.safetensors").read_bytes() == b"1" * 5000


def test_a_repository_that_does_not_exist_is_one_line(hub: Hub, tmp_path: Path) -> None:
    code, _, err = run(hub.url, tmp_path, repo="maker/tinny")
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith(
        "CheckpointError: there is no directory and no repo 'maker/tinny' on the hub"
    )


def test_a_repository_without_a_configuration_is_no_model(hub: Hub, tmp_path: Path) -> None:
    del hub.files[MAIN]["config.json"]
    code, _, err = run(hub.url, tmp_path)
    assert (code, err.splitlines()) == (
        1,
        [
            "CheckpointError: maker/tiny has no config.json, so it is no model that can be served from here"
        ],
    )


def test_no_network_and_no_cache_is_one_line(tmp_path: Path) -> None:
    code, _, err = run("http://127.0.0.1:9", tmp_path)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith(
        "CheckpointError: maker/tiny is not in the cache, and the hub cannot be reached"
    )
    code, _, offline = run("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert (code, offline) == (1, err)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("Data processing error: No space left on device")]
)
def test_a_full_disk_says_what_is_free_and_where(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **keywords: object) -> str:
        raise error

    listing = SimpleNamespace(siblings=[])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *arguments, **keywords: listing)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        CapacityError, match=r"no space left for maker/tiny: .* GB free at .*--download-dir"
    ):
        download("maker/tiny", None, str(tmp_path), list)
