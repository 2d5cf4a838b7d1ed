"""HTTPS, Unix sockets, path prefixes, cross-origin requests and API keys, with a real client."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_support import Running, running
from tokenspeed_server.announce import address
from tokenspeed_server.listen import listen
from tokenspeed_server.serve import _warn_if_open
from tokenspeed_server.settings import ServerConfig
from tokenspeed_server.tls import check_certificate
from tokenspeed_server.unix_socket import listen_unix

from tokenspeed_core.errors import CapacityError, ConfigError

PAGE = "https://app.example"
KEY = {"authorization": "Bearer k"}


def make_certificate(path: Path, *options: str) -> Path:
    """Write a self-signed certificate for this host, and its key, into one file."""
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=x -addext {names}"
    files = ["-keyout", f"{path}.key", "-out", f"{path}.crt"]
    subprocess.run(
        [*command.split(), *files, *(options or ("-nodes",))], check=True, capture_output=True
    )
    path.write_text(Path(f"{path}.key").read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate") / "server.pem")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Running]:
    options = {"api_key": "k", "root_path": "/llm", "allowed_origins": [PAGE], "created": 5}
    folder = tmp_path_factory.mktemp("server")
    with running(folder, options=options, certificate=str(certificate)) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_https_serves_whole_answers_and_streams(client: httpx.Client) -> None:
    assert client.base_url.scheme == "https"
    body = {"prompt": "hello", "max_tokens": 4}
    whole = client.post("/v1/completions", json=body, headers=KEY).json()
    events = client.post("/v1/completions", json={**body, "stream": True}, headers=KEY).text
    texts = [json.loads(e[6:])["choices"][0]["text"] for e in events.split("\n\n") if "text" in e]
    assert "".join(texts) == whole["choices"][0]["text"]


def test_plain_http_is_refused_on_a_tls_port(server: Running) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http"), trust_env=False)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bearer "])
def test_auth_scheme_is_case_insensitive(client: httpx.Client, scheme: str) -> None:
    assert client.get("/v1/models", headers={"authorization": f"{scheme} k"}).status_code == 200


@pytest.mark.parametrize("given", ["k", "Bearer K", "Basic k", "Bearerk", "bearer"])
def test_wrong_key_or_scheme_is_refused(client: httpx.Client, given: str) -> None:
    assert client.get("/v1/models", headers={"authorization": given}).status_code == 401


def test_path_prefix_is_optional_on_every_route(client: httpx.Client) -> None:
    for prefix in ("", "/llm"):
        assert client.get(f"{prefix}/health").status_code == 200
        assert client.get(f"{prefix}/v1/models").status_code == 401
        models = client.get(f"{prefix}/v1/models", headers=KEY).json()
        assert models["data"][0]["created"] == 5
    described = client.get("/llm/openapi.json", headers=KEY).json()
    assert described["servers"] == [{"url": "/llm"}]
    assert client.get("/llm/llm/v1/models", headers=KEY).status_code == 404
    assert client.get("/llmhealth").status_code == 401


def test_preflight_of_an_allowed_page_needs_no_key(client: httpx.Client) -> None:
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    response = client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
    other = client.options("/v1/models", headers={**asked, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_page_can_read_answers_and_errors(client: httpx.Client, stream: bool) -> None:
    ask: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "stream": stream}
    for body, headers, status in ((ask, KEY, 200), (ask, {}, 401), ({}, KEY, 400)):
        response = client.post("/v1/completions", json=body, headers={**headers, "origin": PAGE})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_unix_socket_is_shared_by_api_workers(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with running(tmp_path, uds=str(path), num_workers=2) as server:
        for _ in range(8):
            with server.client() as client:
                body = {"prompt": "hello", "max_tokens": 2}
                assert client.post("/v1/completions", json=body).status_code == 200
        server.process.terminate()
        assert server.process.wait(60) == 0
    assert not path.exists()


def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(path)
    with listen_unix(path) as (bound,), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        with pytest.raises(CapacityError), listen_unix(path):
            pass
        assert bound.accept()
    assert not Path(path).exists()


@pytest.mark.parametrize("kind", ["file", "folder", "missing"])
def test_unusable_unix_socket_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("data")
    where = {"file": path, "folder": tmp_path, "missing": path / "x"}[kind]
    with pytest.raises((CapacityError, ConfigError)) as caught, listen_unix(str(where)):
        pass
    assert "--uds" in str(caught.value)
    assert kind != "file" or path.read_text() == "data"


def test_wrong_certificates_are_refused(tmp_path: Path, certificate: Path) -> None:
    other = make_certificate(tmp_path / "other.pem")
    secret = make_certificate(tmp_path / "secret.pem", "-passout", "pass:word")
    (tmp_path / "text").write_text("no PEM")
    check_certificate(str(certificate), None)
    check_certificate(f"{certificate}.crt", f"{certificate}.key")
    for certfile, keyfile, named in (
        (tmp_path / "none", None, "--ssl-certfile"),
        (certificate, tmp_path / "none", "--ssl-keyfile"),
        (certificate, f"{other}.key", "--ssl-keyfile"),
        (tmp_path / "text", None, "--ssl-certfile"),
        (f"{certificate}.crt", None, "--ssl-certfile"),
        (secret, None, "encrypted"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_certificate(str(certfile), None if keyfile is None else str(keyfile))
        assert named in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "curl"),
    [
        ({}, "curl http://127.0.0.1:"),
        ({"root_path": "/llm/"}, "/llm"),
        ({"ssl_certfile": "c.pem"}, "curl -k https://127.0.0.1:"),
        ({"uds": "/tmp/a b"}, "curl --unix-socket '/tmp/a b' http://localhost"),
    ],
)
def test_curl_command_fits_the_address(settings: dict[str, Any], curl: str) -> None:
    (bound,) = listen("127.0.0.1", 0)
    with bound:
        command = address(bound, ServerConfig(**settings))[1]
    assert curl in command
    assert shlex.split(command)[0] == "curl"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_origins", "localhost:3000"),
        ("allowed_origins", "https://a.example/"),
        ("allowed_origins", '["https://a.example", "b"]'),
        ("allowed_origins", "[x"),
        ("root_path", "llm"),
        ("root_path", "/"),
        ("uds", "x" * 108),
        ("ssl_keyfile", "key.pem"),
    ],
)
def test_wrong_network_settings_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_keywords(**{name: value})
    assert name in str(caught.value).replace("-", "_")


@pytest.mark.parametrize(
    "given", [f"{PAGE}, http://localhost:3000", f'["{PAGE}", "http://localhost:3000"]']
)
def test_origins_are_a_list_of_either_form(given: str) -> None:
    config = ServerConfig.from_keywords(allowed_origins=given)
    assert config.allowed_origins == (PAGE, "http://localhost:3000")


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_key": "secret"}, False),
        ({"host": "127.0.0.1"}, False),
        ({"uds": "x"}, False),
    ],
)
def test_open_server_without_a_key_is_warned_about(
    settings: dict[str, str], is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_if_open(ServerConfig.from_keywords(**settings))
    assert ["--api-key" in message for message in caplog.messages] == [True] * is_open


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "é..", "\0", " "])
def test_invalid_host_is_rejected_with_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen(host, 0)
