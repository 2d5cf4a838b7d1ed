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
from tokenspeed_chat.client import ChatClient, Delta, ServerError, Usage
from tokenspeed_chat.screen import Screen
from tokenspeed_chat.server import started_server
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.cli import main
from tokenspeed_core.commands.settings import EngineDeadError


class Handler(BaseHTTPRequestHandler):
    """An OpenAI server that thinks, then answers with the number of messages."""

    seen: list[dict[str, Any]]
    mode = "fine"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.mode == "locked":
            self._send(json.dumps({"error": {"message": "missing API key"}}).encode(), 401)
            return
        self._send(json.dumps({"data": [{"id": "tiny", "owned_by": "tokenspeed"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**body, "key": self.headers.get("Authorization")})
        if self.mode == "refuse":
            self._send(json.dumps({"error": {"message": "max_tokens: too many"}}).encode(), 400)
            return
        parts = ["n=", str(len(body["messages"])), " ü"]
        deltas: list[dict[str, str]] = [{"role": "assistant"}, {"reasoning_content": "Hm."}]
        deltas += [{"content": part} for part in parts]
        events: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
        usage = {"prompt_tokens": 7, "completion_tokens": 4}
        usage_event = {**usage, "prompt_tokens_details": {"cached_tokens": 5}}
        events.append({"choices": [], "usage": usage_event})
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


class Terminal(io.StringIO):
    """A terminal that a user types into."""

    def isatty(self) -> bool:
        return True


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let a user type these lines, then Ctrl-D."""
    monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def without_prompts(output: str) -> str:
    """Return the output without the prompts of `input`."""
    return output.replace("> ", "").replace(". ", "")


def test_prompt_and_pipe_are_one_question(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    pipe(monkeypatch, "first\n\nsecond\n")
    words = ["--url", f"{url}/v1", "--system", "be brief", "--temperature", "0"]
    assert main(["chat", "review this", *words, "--max-tokens", "9", "--api-key", "k"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "n=2 ü\n"
    assert captured.err == ""
    (seen,) = handler.seen
    assert seen["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "review this\n\nfirst\n\nsecond"},
    ]
    assert (seen["key"], seen["temperature"], seen["max_tokens"]) == ("Bearer k", 0, 9)


def test_empty_pipe_without_a_prompt_is_an_error(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe(monkeypatch, " \n")
    assert main(["chat", "--url", server[0]]) == 2
    assert "PROMPT" in capsys.readouterr().err
    assert not server[1].seen


def test_typed_turns_are_one_conversation(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    type_lines(monkeypatch, "hello", "", "again")
    assert main(["chat", "--url", url]) == 0
    captured = capsys.readouterr()
    assert without_prompts(captured.out) == "n=1 ü\nn=3 ü\n"
    assert [each["role"] for each in handler.seen[1]["messages"]] == ["user", "assistant", "user"]
    assert handler.seen[1]["messages"][1]["content"] == "n=1 ü"
    assert "Hm." in captured.err
    assert "7 prompt tokens (5 cached), 4 tokens" in captured.err


def test_messages_of_several_lines_are_joined(
    server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    type_lines(monkeypatch, '"""', "a", "", 'b"""', "c\\", "d")
    assert main(["chat", "--url", url]) == 0
    assert [each["messages"][-1]["content"] for each in handler.seen] == ["a\n\nb", "c\nd"]


def test_commands_change_the_conversation(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    commands = ("/help", "one", "/system be brief", "two", "/clear", "three", "/system", "/nothing")
    type_lines(monkeypatch, *commands, "four", "/exit", "five")
    assert main(["chat", "--url", url]) == 0
    roles = [[each["role"][0] for each in seen["messages"]] for seen in handler.seen]
    assert ["".join(each) for each in roles] == ["u", "suau", "su", "uau"]
    errors = capsys.readouterr().err
    assert "/clear" in errors
    assert "unknown command /nothing" in errors


def test_running_server_at_the_default_address_is_used(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    pipe(monkeypatch, "hello")
    assert main(["chat", "--port", url.rpartition(":")[2]]) == 0
    assert capsys.readouterr().out == "n=1 ü\n"
    handler.mode = "locked"
    pipe(monkeypatch, "hello")
    assert main(["chat", "--port", url.rpartition(":")[2]]) == 2
    assert "TOKENSPEED_API_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("refuse", "400 max_tokens: too many"), ("cut", "ended the answer early")],
)
def test_error_or_cut_answer_fails_the_command(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    expected: str,
) -> None:
    url, handler = server
    handler.mode = mode
    pipe(monkeypatch, "hello")
    assert main(["chat", "--url", url]) == 2
    assert expected in capsys.readouterr().err


def test_failed_turn_is_dropped_from_the_conversation(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    stream = ChatClient.stream

    def failing(*arguments: Any) -> Iterator[Delta | Usage]:
        handler.mode = "fine" if handler.seen else "refuse"
        yield from stream(*arguments)

    monkeypatch.setattr(ChatClient, "stream", failing)
    type_lines(monkeypatch, "hello", "again")
    assert main(["chat", "--url", url]) == 0
    assert "too many" in capsys.readouterr().err
    assert [each["content"] for each in handler.seen[1]["messages"]] == ["again"]


def test_ctrl_c_stops_the_answer_and_keeps_its_text(
    server: tuple[str, type[Handler]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = server
    stream = ChatClient.stream

    def interrupted(*arguments: Any) -> Iterator[Delta | Usage]:
        if handler.seen:
            yield from stream(*arguments)
            return
        parts = stream(*arguments)
        yield next(parts)
        yield next(parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatClient, "stream", interrupted)
    type_lines(monkeypatch, "hello", "again")
    assert main(["chat", "--url", url]) == 0
    captured = capsys.readouterr()
    assert without_prompts(captured.out) == "n=\nn=3 ü\n"
    assert "stopped" in captured.err


def test_missing_server_is_an_error_with_a_hint() -> None:
    with pytest.raises(ServerError, match="tokenspeed serve"):
        ChatClient("127.0.0.1:1").model()


def test_missing_key_is_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    server: tuple[str, type[Handler]],
) -> None:
    pipe(monkeypatch, "hello")
    url, handler = server
    handler.mode = "locked"
    assert main(["chat", "--url", url]) == 2
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--url", "http://127.0.0.1:1", "--port", "1"),
            "--url",
        ),
        (
            ("--url", "http://127.0.0.1:1"),
            "no server at http://127.0.0.1:1 (Connection refused)",
        ),
        (
            ("--url", ""),
            "--url '': ",
        ),
        (("--url", "ftp://x"), "--url 'ftp://x': "),
        (
            ("--url", "http://[::1"),
            "--url 'http://[::1': ",
        ),
        (("--url", "x:99999"), "--url 'x:99999': "),
        (("--url", "not a url"), "--url 'not a url': "),
        (("--prt", "1"), "--prt: no such setting; did you mean --port?"),
        (("--urll", "x"), "--urll: no such setting; did you mean --url?"),
        (("--temprature", "1"), "--temprature: no such setting; did you mean --temperature"),
        (("--jsn",), "--jsn: no such setting; `tokenspeed chat --help` lists the settings"),
        (("--help=bakends",), "did you mean --help=backends?"),
    ],
)
def test_usage_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    expected: str,
) -> None:
    pipe(monkeypatch, "hello")
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    page: bytes,
    said: str,
) -> None:
    pipe(monkeypatch, "hello")
    handler = type("Other", (Elsewhere,), {"status": status, "page": page})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_address[1]}"
        assert main(["chat", "--url", url]) == 2
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
    assert "--url URL" in page
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
    config = ServerConfig.from_keywords(
        model="m", attention_backend={"decode": "a,b"}, max_num_seqs=4
    )
    with started_server(config, Screen()) as url:
        settings, environ, pid = json.loads(fake_serve.read_text())
        assert url == f"http://127.0.0.1:{settings['port']}"
        assert ChatClient(url).is_ready()
        assert is_alive(pid)
    assert not is_alive(pid)
    assert settings["attention_backend"] == {"default": ["auto"], "decode": ["a", "b"]}
    assert (settings["model"], settings["max_num_seqs"]) == ("m", 4)
    assert settings["port"] != 1
    assert "TOKENSPEED_PORT" not in environ


def test_server_that_ends_at_once_is_reported(fake_serve: Path) -> None:
    with (
        pytest.raises(EngineDeadError, match="status 3") as caught,
        started_server(ServerConfig(model="broken"), Screen()),
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
        f"import sys, time\nfrom tokenspeed_chat.screen import Screen\n"
        f"from tokenspeed_chat.server import started_server\n"
        f"from tokenspeed_server.settings import ServerConfig\nsys.executable = {sys.executable!r}\n"
        f"with started_server(ServerConfig(model={model!r}), Screen()):\n    print('up', flush=True)\n    time.sleep(60)\n"
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
