"""`tokenspeed serve` on the demo: clients, signals, deaths, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from serving import (
    COMMAND,
    DEMO,
    WEATHER,
    Background,
    Served,
    environment,
    has_ended,
    run_command,
    served,
    wait_for_work,
    wait_until,
    wait_until_idle,
)

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {**DEMO, "prompt": "a", "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("serve"), "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: Served) -> openai.OpenAI:
    return server.openai()


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- answers ---------------------------------------------------------------------------------------


def test_demo_adds_numbers(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**DEMO, messages=say("What is 23 + 45?"))
    assert "68" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_printed_curl_command_works(server: Served) -> None:
    assert server.curl.startswith("curl ")
    done = subprocess.run(
        server.curl.replace("curl ", "curl -sS --noproxy '*' ", 1),
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def documented_commands() -> list[str]:
    """Return the curl commands of the documentation. The tutorial's needs its plugin, and has its own test."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    texts = [page.read_text(encoding="utf-8") for page in pages if "tutorial" not in page.name]
    blocks = [
        block for text in texts for block in re.findall(r"```(?:ba)?sh\n(.*?)```", text, re.S)
    ]
    return [
        command
        for block in blocks
        for command in re.split(r"\n(?=curl )", block)
        if command[:5] == "curl "
    ]


def test_curl_commands_of_the_documentation_work(server: Served) -> None:
    commands = documented_commands()
    assert len(commands) >= 5
    for command in commands:
        own = command.replace("http://127.0.0.1:8000", server.url)
        done = subprocess.run(
            own.replace("curl ", "curl -sS --fail-with-body --noproxy '*' ", 1),
            shell=True,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert json.loads(done.stdout)


def test_health_version_and_models_answer(server: Served, sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["demo"]
    assert sdk.models.retrieve("demo").id == "demo"
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").status_code == 200
        answer = http.get("/v1/plugins")
        assert str(Path(__file__).parents[2]) not in answer.text, "shows folders of the machine"
        assert sys.prefix not in answer.text
        report = answer.json()
        assert report["architecture"] == "Qwen3ForCausalLM"
        (family,) = (each for each in report["plugins"] if each["name"] == "Qwen3ForCausalLM")
        assert (family["kind"], family["status"], family["distribution"]) == (
            "models",
            "ok",
            "tokenspeed-models",
        )
        decode = next(each for each in report["kernel_plan"]["ops"] if each["op"] == "attention")
        refused = {
            each["backend"]: each["reasons"] for each in decode["verdicts"] if not each["fits"]
        }
        assert decode["backend"] not in refused
        assert all(reasons for reasons in refused.values())


def test_streamed_text_equals_the_whole_and_is_cached(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**DEMO, "prompt": list(range(40, 100)), "max_tokens": 24}
    whole = sdk.completions.create(**ask)
    chunks = list(
        sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    )
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (
        usage.prompt_tokens_details.cached_tokens == 48
    )  # whole blocks of 16, less the last token's
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        60,
        whole.usage.completion_tokens if whole.usage else 0,
    )


def test_streamed_chat_equals_the_whole_answer(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**DEMO, "messages": say("Copy this text: naïve café 日本語 🙂 done")}
    whole = sdk.chat.completions.create(**ask)
    chunks = list(sdk.chat.completions.create(**ask, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 3
    assert "\ufffd" not in texts
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_tools_give_calls_by_default(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**DEMO, "messages": say("Get the weather in Paris.")}
    plain, with_tools = (
        sdk.chat.completions.create(**ask, **extra) for extra in ({}, {"tools": [WEATHER]})
    )
    assert plain.usage is not None
    assert with_tools.usage is not None
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens + 20
    (call,) = with_tools.choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert with_tools.choices[0].finish_reason == "tool_calls"


def test_logprobs_n_seed_and_stop_work(sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": say("What is 3 + 4?"),
        "n": 3,
        "temperature": 1,
        "seed": 1,
        "logprobs": True,
        "stop": ["</think>"],
    }
    first, second = (
        sdk.chat.completions.create(**ask, **extra) for extra in ({"top_logprobs": 2}, {})
    )
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    for choice in first.choices:
        assert "</think>" not in (choice.message.content or "")
        assert choice.logprobs is not None
        for entry in choice.logprobs.content or []:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 2


# -- many clients -------------------------------------------------------------------------------------------


def test_echo_scores_equal_those_of_generation(sdk: openai.OpenAI) -> None:
    made = sdk.completions.create(**DEMO, prompt="12 + 34 =", max_tokens=8, logprobs=1, echo=True)
    given = made.choices[0].logprobs
    assert given is not None and given.token_logprobs is not None
    scored = sdk.completions.create(
        **DEMO, prompt=made.choices[0].text, max_tokens=0, logprobs=1, echo=True
    )
    again = scored.choices[0].logprobs
    assert again is not None and again.token_logprobs is not None
    num = len(again.tokens or ())  # an end-of-sequence token has no text
    assert again.tokens == (given.tokens or [])[:num]
    # The logits are bfloat16, whose steps are 0.125 at 16; processors differ in how they sum.
    assert again.token_logprobs[1:] == pytest.approx(given.token_logprobs[1:num], abs=0.15)


def test_concurrent_clients_get_the_same_answers(server: Served) -> None:
    """There are more clients than slots."""
    sdk = server.openai()

    def ask(number: int) -> str:
        prompt = f"What is {number} + {number + 7}?"
        return sdk.completions.create(**DEMO, prompt=prompt, max_tokens=12).choices[0].text

    alone = [ask(number) for number in range(40)]
    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(ask, range(40))) == alone


def cpu_seconds(server: Served) -> float:
    """Return the CPU time of the engine, which does not depend on the load of the machine."""
    return float(sum(server.engine().cpu_times()[:2]))


@pytest.mark.parametrize("streams", [True, False])
def test_disconnect_frees_the_slots(server: Served, streams: bool) -> None:
    """A client that holds all slots disconnects; its 4,000 tokens are not generated."""
    sdk = server.openai()
    body = {
        **DEMO,
        "prompt": "a",
        "ignore_eos": True,
        "max_tokens": 4000,
        "n": 16,
        "stream": streams,
    }
    with server.http() as http:
        if streams:
            with http.stream("POST", "/v1/completions", json=body) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.5)
    left = cpu_seconds(server)
    sdk.completions.create(**DEMO, prompt="a", max_tokens=2)
    wait_until_idle([server.engine()])
    assert cpu_seconds(server) - left < 2, "the engine continued aborted requests"


def test_slow_reader_does_not_block_others(server: Served) -> None:
    body = json.dumps(
        {**DEMO, "prompt": "a", "ignore_eos": True, "max_tokens": 2000, "stream": True}
    ).encode()
    address = httpx.URL(server.url)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((address.host, address.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        assert slow.recv(12) == b"HTTP/1.1 200"  # and reads no more
        server.openai().completions.create(**DEMO, prompt="b", max_tokens=8)


# -- invalid input --------------------------------------------------------------------------

REFUSED: dict[str, tuple[int, bytes, str]] = {
    "not JSON": (400, b"{", "JSON"),
    "deep": (400, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    "unknown field": (400, b'{"prompt": "a", "temprature": 1}', "temprature"),
    "wrong model": (404, b'{"model": "gpt", "prompt": "a"}', "gpt"),
    "id too large": (400, b'{"prompt": [99999999]}', "99999999"),
    "too long": (400, json.dumps({"prompt": [5] * 5000}).encode(), "4096"),
    "text too long": (400, json.dumps({"prompt": "many words " * 50_000}).encode(), "4096"),
    "max_tokens too large": (400, b'{"prompt": "a", "max_tokens": 100000}', "max_tokens"),
    "n times prompts": (400, json.dumps({"prompt": ["a"] * 100, "n": 100}).encode(), "n"),
    "bias id": (400, b'{"prompt": "a", "logit_bias": {"9999999": 1}}', "logit_bias"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_by_name(server: Served, what: str) -> None:
    status, body, names = REFUSED[what]
    with server.http(**{"content-type": "application/json"}) as http:
        response = http.post("/v1/completions", content=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert names in f"{error['message']} {error['param']}"
        assert len(error["message"]) < 600
        after = http.post("/v1/completions", json={**DEMO, "prompt": "a", "max_tokens": 1})
        assert after.status_code == 200


def test_oversized_body_gets_status_413(server: Served) -> None:
    with server.http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "' + b"a" * (40 << 20) + b'"}')
    assert response.status_code == 413


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 100,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=["TLS", "cut", "version", "zeros", "length", "chunks", "long head"],
)
def test_invalid_http_is_refused(server: Served, raw: bytes) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=10) as connection:
        connection.sendall(raw)
        try:
            answer = connection.recv(4096)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or re.match(rb"HTTP/1\.1 (4\d\d|505)", answer), answer
    with server.http() as http:
        assert http.get("/health").status_code == 200


# -- idle ---------------------------------------------------------------------------------------------------


def test_idle_server_uses_little_cpu(server: Served) -> None:
    api = psutil.Process(server.process.pid)
    wait_until_idle([api, *api.children(recursive=True)])


# -- shutdown ---------------------------------------------------------------------------------------------------


def test_key_is_required_and_sigterm_drains(tmp_path: Path) -> None:
    with served(tmp_path, "--api-key", "secret") as server:
        assert "secret" not in server.curl
        assert "Authorization" in server.curl
        for key in ("wrong", "secre", "sécret"):
            with server.http() as http:
                refused = http.post(
                    "/v1/completions",
                    json={"prompt": "a"},
                    headers={b"authorization": f"Bearer {key}".encode()},
                )
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
        engine = server.engine()
        stream = server.openai("secret").completions.create(**LONG, max_tokens=250, stream=True)
        first = next(stream)
        # A service manager signals every process.
        for process in (engine, server.process):
            process.send_signal(signal.SIGTERM)
        rest = Background(lambda: list(stream))
        with server.http() as http:
            wait_until(
                lambda: http.get("/ready").status_code == 503, 60, "unhealthy while draining"
            )
        assert server.process.wait(60) == 0
        assert len([first, *rest.result()]) >= 200
        assert rest.result()[-1].choices[0].finish_reason == "length"
        wait_until(lambda: has_ended(engine), 60, "the engine's end")
        assert not server.sockets()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.release),
        pytest.param(signal.SIGKILL, marks=pytest.mark.release),
    ],
)
def test_chat_ends_the_server_that_it_started(
    tmp_path: Path, many_processors: None, number: signal.Signals
) -> None:
    keyboard, terminal = os.openpty()
    chat = subprocess.Popen(
        [*COMMAND, "chat", "--port", "0"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(tmp_path),
    )
    os.close(terminal)
    assert chat.stdout is not None
    os.write(keyboard, b"Hello!\n")
    assert chat.stdout.readline()
    started = psutil.Process(chat.pid).children(recursive=True)
    assert len(started) == 3, "the engine, one API worker and its template process"
    chat.send_signal(number)
    assert chat.wait(60) == (128 + number if number != signal.SIGKILL else -number)
    _, alive = psutil.wait_procs(started, 30)
    assert not alive
    os.close(keyboard)
    chat.stdout.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.release
def test_stopped_engine_is_unhealthy_and_ends_with_the_server(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as server:
        engine = server.engine()
        waiting = Background(lambda: server.openai().completions.create(**LONG, max_tokens=4000))
        wait_for_work(engine)
        engine.send_signal(signal.SIGSTOP)
        with server.http() as http:
            assert http.get("/health").status_code == 200
            wait_until(lambda: http.get("/health").status_code == 503, 20, "unhealthy")
        server.process.kill()
        server.process.wait()
        wait_until(lambda: has_ended(engine), 30, "the engine's end")
        assert isinstance(waiting.result(), openai.APIConnectionError)
        assert not server.sockets()


@pytest.mark.parametrize("streams", [True, pytest.param(False, marks=pytest.mark.release)])
def test_killed_engine_fails_requests_and_ends_the_server(tmp_path: Path, streams: bool) -> None:
    with served(tmp_path) as server:
        sdk, engine = server.openai(), server.engine()
        waiting = Background(
            lambda: (
                list(sdk.completions.create(**LONG, max_tokens=4000, stream=True))
                if streams
                else sdk.completions.create(**LONG, max_tokens=4000)
            )
        )
        wait_for_work(engine)
        engine.kill()
        error = waiting.result(30)
        assert isinstance(error, openai.APIError if streams else openai.InternalServerError)
        assert error.code == "engine_dead"
        assert server.process.wait(60) == 2
        assert "the engine died" in server.stderr().splitlines()[-1]
        assert "Traceback" not in server.stderr()
        assert not server.sockets()


def test_ctrl_c_ends_an_idle_server(server: Served) -> None:
    """The last test of this file, since it ends the server that the others share."""
    port = str(httpx.URL(server.url).port)
    status, err = run_command(server.folder, "serve", "--port", port)
    assert status == 2
    assert re.fullmatch(rf"tokenspeed: .*{port}.*--port.*\n", err), err
    with_chat = subprocess.run(
        [*COMMAND, "chat", "--url", server.url, "--temperature", "0"],
        input="What is 23 + 45?\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(server.folder),
        check=True,
    )
    assert "68" in with_chat.stdout
    assert with_chat.stderr == ""
    written = len(server.stderr())
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.stderr()[written:]
    assert not server.sockets()
