"""The terminal chat, with a running server and with one that it starts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_chat.client import ChatClient, ServerError
from tokenspeed_chat.server import started_server

from tokenspeed_core.cli import main
from tokenspeed_core.commands.settings import Config, EngineDeadError


class Handler(BaseHTTPRequestHandler):
    """An OpenAI server that answers with the number of messages."""

    seen: list[dict[str, Any]]
    mode = "fine"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**body, "key": self.headers.get("Authorization")})
        if self.mode == "refuse":
            self._send(json.dumps({"error": {"message": "max_tokens: too many"}}).encode(), 400)
            return
        parts = ["n=", str(len(body["messages"])), " ü"]
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": part}}]} for part in parts]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._send((text + ("" if self.mode == "cut" else "data: [DONE]\n\n")).encode())

    def _send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Fresh", (Handler,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", handler
        http.shutdown()


def test_lines_of_a_pipe_are_turns_of_one_chat(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    status = main(
        [
            "chat",
            "--base-url",
            f"{url}/v1",
            "--system",
            "be brief",
            "--temperature",
            "0",
            "--api-key",
            "k",
        ]
    )
    assert status == 0
    assert capsys.readouterr().out == "n=2 ü\nn=4 ü\n"
    assert [each["role"] for each in handler.seen[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert handler.seen[1]["messages"][2]["content"] == "n=2 ü"
    assert {each["key"] for each in handler.seen} == {"Bearer k"}
    assert {each["temperature"] for each in handler.seen} == {0}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("refuse", "400 max_tokens: too many"), ("cut", "ended the answer early")],
)
def test_error_or_cut_answer_ends_a_piped_chat(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    expected: str,
) -> None:
    url, handler = server
    handler.mode = mode
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", "--base-url", url]) == 2
    assert expected in capsys.readouterr().err
    assert len(handler.seen) == 1


def test_ctrl_c_stops_the_answer_and_keeps_its_text(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    stream = ChatClient.stream

    def interrupted(*arguments: Any) -> Iterator[str]:
        if len(handler.seen) == 0:
            yield next(stream(*arguments))
            raise KeyboardInterrupt
        yield from stream(*arguments)

    monkeypatch.setattr(ChatClient, "stream", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", "--base-url", url]) == 0
    captured = capsys.readouterr()
    assert captured.out == "n=\nn=3 ü\n"
    assert "[stopped]" in captured.err


def test_missing_server_is_an_error_with_a_hint() -> None:
    with pytest.raises(ServerError, match="tokenspeed serve"):
        ChatClient("127.0.0.1:1").model()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--base-url", "http://127.0.0.1:1", "--port", "1"),
            "--base-url",
        ),
        (
            ("--base-url", "http://127.0.0.1:1"),
            "no server at http://127.0.0.1:1 (Connection refused)",
        ),
        (
            ("--base-url", ""),
            "--base-url '': ",
        ),
        (("--base-url", "ftp://x"), "--base-url 'ftp://x': "),
        (
            ("--base-url", "http://[::1"),
            "--base-url 'http://[::1': ",
        ),
        (("--base-url", "x:99999"), "--base-url 'x:99999': "),
        (("--base-url", "not a url"), "--base-url 'not a url': "),
        (("--prt", "1"), "--prt: no such setting; did you mean --port?"),
        (("--url", "x"), "--url: no such setting; `tokenspeed chat --help` lists the settings"),
        (("--base-ulr", "x"), "--base-ulr: no such setting; did you mean --base-url?"),
        (("--temprature", "1"), "--temprature: no such setting; did you mean --temperature"),
        (("--jsn",), "--jsn: no such setting; `tokenspeed chat --help` lists the settings"),
        (("--help=bakends",), "did you mean --help=backends?"),
    ],
)
def test_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    assert main(["chat", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert expected in captured.err


class Elsewhere(BaseHTTPRequestHandler):
    """A web server without OpenAI's API."""

    status, page = 200, b"<html>hello</html>"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (200, b"<html>hello</html>", "/v1/models"),
        (200, b"[]", "/v1/models"),
        (200, b'{"data": [{}]}', "/v1/models"),
        (404, b"<!DOCTYPE HTML>\n<html>no such page</html>", "404 Not Found"),
    ],
)
def test_server_without_the_api_is_an_error(
    capsys: pytest.CaptureFixture[str], status: int, page: bytes, said: str
) -> None:
    handler = type("Other", (Elsewhere,), {"status": status, "page": page})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_address[1]}"
        assert main(["chat", "--base-url", url]) == 2
        http.shutdown()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error
    assert said in error


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(['chat', '--help']);"
        "print('HEAVY', *({'torch', 'numpy', 'uvicorn', 'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"


def test_help_lists_own_options_and_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "--help"]) == 0
    page = capsys.readouterr().out
    assert "--base-url URL" in page
    assert "--max-model-len" in page
    assert main(["chat", "--help=--port"]) == 0
    assert "--port 0..65535" in capsys.readouterr().out


@pytest.fixture
def fake_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace Python by a program that serves /health on the configured port, or ends."""
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import http.server, json, os, sys\n"
        "settings = json.load(open(sys.argv[sys.argv.index('--config') + 1]))\n"
        f"json.dump([settings, dict(os.environ), os.getpid()], open({str(tmp_path / 'seen')!r}, 'w'))\n"
        "if settings.get('model') == 'broken':\n"
        "    print('no such model')\n"
        "    sys.exit(3)\n"
        "if settings.get('model') == 'slow':\n"
        "    import time\n"
        "    time.sleep(60)\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', settings['port']), Handler).serve_forever()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path / "seen"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_server_gets_the_settings_and_is_stopped(
    fake_serve: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSPEED_PORT", "1")
    config = Config.from_keywords(
        model="m", attention_backend={"decode": "a,b"}, port=9, max_num_seqs=4
    )
    with started_server(config) as url:
        settings, environ, pid = json.loads(fake_serve.read_text())
        assert url == f"http://127.0.0.1:{settings['port']}"
        assert ChatClient(url).is_healthy()
        assert is_alive(pid)
    assert not is_alive(pid)
    assert settings["attention_backend"] == {"default": ["auto"], "decode": ["a", "b"]}
    assert (settings["model"], settings["max_num_seqs"]) == ("m", 4)
    assert settings["port"] not in (1, 9)
    assert "TOKENSPEED_PORT" not in environ


def test_server_that_ends_at_once_is_reported(fake_serve: Path) -> None:
    with (
        pytest.raises(EngineDeadError, match="status 3") as caught,
        started_server(Config(model="broken")),
    ):
        pass
    assert "no such model" in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
@pytest.mark.parametrize("model", ["m", "slow"])
def test_killed_chat_leaves_no_server_and_no_file(
    fake_serve: Path, tmp_path: Path, model: str
) -> None:
    script = tmp_path / "chat.py"
    script.write_text(
        f"import sys, time\nfrom tokenspeed_chat.server import started_server\n"
        f"from tokenspeed_core.config import Config\nsys.executable = {sys.executable!r}\n"
        f"with started_server(Config(model={model!r})):\n    print('up', flush=True)\n    time.sleep(60)\n"
    )
    real = Path(sys.prefix) / "bin" / "python"
    (tmp_path / "tmp").mkdir()
    settings = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    chat = subprocess.Popen([str(real), str(script)], stdout=subprocess.PIPE, env=settings)
    assert chat.stdout is not None
    deadline = time.monotonic() + 20
    if model == "m":
        assert chat.stdout.readline() == b"up\n"
    while not fake_serve.exists() or not fake_serve.read_text().endswith("]"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = json.loads(fake_serve.read_text())[2]
    chat.send_signal(signal.SIGKILL)
    chat.wait()
    chat.stdout.close()
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
    assert not list((tmp_path / "tmp").iterdir())
