"""Packages made by `plugins new` are built, installed next to our wheels, and used by a server.

The tests install them into their own environment, which `nox -s wheels` makes, and uninstall them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

TOKENSPEED = (str(Path(sys.executable).with_name("tokenspeed")),)
PIP = (sys.executable, "-P", "-m", "pip", "-q", "--disable-pip-version-check")
KINDS = (
    "attention",
    "moe",
    "linear",
    "sampling",
    "model",
    "tool-parser",
    "reasoning-parser",
    "policy",
    "command",
)
CHAT = (  # every plugin of acme that a chat with the demo can use
    "--attention-backend",
    "acme/attention",
    "--sampling-backend",
    "acme/sampling",
    "--kernel-backend",
    "linear=acme/linear,auto",
    "--schedule-policy",
    "acme/policy",
    "--tool-call-parser",
    "acme/tool-parser",
    "--reasoning-parser",
    "acme/reasoning-parser",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def install(wheels: Sequence[Path]) -> None:
    subprocess.run([*PIP, "install", "--no-index", "--no-deps", *map(str, wheels)], check=True)


def uninstall() -> None:
    subprocess.run([*PIP, "uninstall", "-y", *(f"acme-{kind}" for kind in KINDS)], check=True)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Make a package of each kind and install the wheels for this module; return the wheels."""
    folder = tmp_path_factory.mktemp("acme")
    for kind in KINDS:
        subprocess.run(
            [*TOKENSPEED, "plugins", "new", kind, "acme"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
    made = [f"./acme-{kind}" for kind in KINDS]
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", *made],
        cwd=folder,
        check=True,
    )
    wheels = sorted((folder / "dist").iterdir())
    assert len(wheels) == len(KINDS)
    try:
        install(wheels)
        yield wheels
    finally:
        uninstall()


@pytest.fixture
def without_acme(acme: list[Path]) -> Iterator[None]:
    """Uninstall the packages for one test."""
    uninstall()
    try:
        yield
    finally:
        install(acme)


@contextmanager
def served(folder: Path, *words: str) -> Iterator[httpx.Client]:
    """Run a server for a block; yield a client when it is ready."""
    command = [*TOKENSPEED, "serve", *words, "--device", "cpu", "--port", "0"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        found = re.search(r" at (http://\S+)", process.stdout.readline())
        assert found, (folder / "errors").read_text()
        transport = httpx.HTTPTransport(retries=3)
        with httpx.Client(
            base_url=found[1], trust_env=False, timeout=60, transport=transport
        ) as client:
            while client.get("/ready").status_code == 503:
                assert process.poll() is None, (folder / "errors").read_text()
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=60)


def plan(client: httpx.Client) -> dict[str, tuple[str, str]]:
    """Return the backend and the distribution of each op."""
    ops = client.get("/v1/plugins").json()["kernel_plan"]["ops"]
    return {each["op"]: (each["backend"], each["distribution"]) for each in ops}


def chat(client: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    """Return the message of the answer."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **more,
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


@pytest.mark.usefixtures("acme")
def test_server_uses_third_party_plugins(
    tmp_path: Path,
) -> None:
    with served(tmp_path, *CHAT) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        answer = chat(client, "what is 23 + 45?")
        assert answer["content"].strip() == "23 + 45 = 68"
        assert "carry" in answer["reasoning_content"]
        (call,) = chat(client, "Get the weather in Paris.", tools=[WEATHER])["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        backends = plan(client)
        for op in ("attention", "linear"):
            assert backends[op] == (f"acme/{op}", f"acme-{op}")
        assert backends["greedy"] == ("acme/sampling", "acme-sampling")
        origins = {
            e["distribution"]: e["origin"] for e in client.get("/v1/plugins").json()["plugins"]
        }
        assert origins["acme-policy"].endswith("acme_policy-0.1.0-py3-none-any.whl")


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(("kind", "words"), [("moe", ("--moe-backend", "acme/moe")), ("model", ())])
def test_example_of_a_package_is_served(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    package = find_spec(f"acme_{kind}")
    assert package is not None
    assert package.origin is not None
    assert Path(package.origin).is_relative_to(sys.prefix), "not the wheel"
    example = str(Path(package.origin).with_name("example"))
    with served(
        tmp_path, example, "--load-format", "dummy", "--skip-tokenizer-init", *words
    ) as client:
        body = {"model": example, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert (
            client.post("/v1/completions", json=body)
            .raise_for_status()
            .json()["usage"]["completion_tokens"]
            == 4
        )
        described = client.get("/v1/plugins").json()
        assert (described["architecture"] == "AcmeForCausalLM") == (kind == "model")
        assert kind != "moe" or plan(client)["moe_experts"] == ("acme/moe", "acme-moe")


@pytest.mark.usefixtures("acme")
def test_command_runs() -> None:
    output = subprocess.run(
        [*TOKENSPEED, "acme-command", "Ada"], capture_output=True, text=True, check=True
    ).stdout
    assert output == "hello, Ada\n"


@pytest.mark.usefixtures("without_acme")
def test_uninstalled_plugin_is_named(
    tmp_path: Path,
) -> None:
    for words, name in (
        (CHAT[:2], "acme/attention"),
        (("--tool-call-parser", "acme/tool-parser"), "acme/tool-parser"),
    ):
        command = [*TOKENSPEED, "serve", "--device", "cpu", "--port", "0", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
        )
        (line,) = [line for line in done.stderr.splitlines() if line != "weights ..."]
        assert done.returncode == 2
        assert f"provides {name}" in line
