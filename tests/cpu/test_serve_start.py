"""Starts of `tokenspeed serve`: errors in one line, settings, interrupts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest
import tokenspeed_demo
from plugin_files import write_plugin
from serving import (
    COMMAND,
    Background,
    engine_of,
    environment,
    run_command,
    served,
    wait_for_work,
    wait_until,
)

pytestmark = pytest.mark.slow

CHECKPOINT = Path(tokenspeed_demo.__file__).parent / "checkpoint"


def make_damaged(folder: Path, damage: str) -> None:
    """Copy the demo's checkpoint and damage it."""
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    if damage == "wrong shape":
        config["intermediate_size"] //= 2
    (folder / "config.json").write_text("{" if damage == "no JSON" else json.dumps(config))
    if damage == "truncated":
        with (folder / "model.safetensors").open("r+b") as weights:
            weights.truncate(3_000_000)
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("wrong shape", "mlp.down_proj.weight"),
        pytest.param("no JSON", "config.json", marks=pytest.mark.release),
        pytest.param("no tokenizer", "tokenizer.json", marks=pytest.mark.release),
    ],
)
def test_bad_checkpoint_is_reported_in_one_line(tmp_path: Path, damage: str, name: str) -> None:
    make_damaged(tmp_path / "model", damage)
    status, err = run_command(
        tmp_path, "serve", str(tmp_path / "model"), "--port", "0", "--log-level", "warning"
    )
    assert status == 2
    assert re.fullmatch(r"tokenspeed: .*\n", err), err
    assert name in err
    assert len(err) < 1500


def dry_run(folder: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `serve --dry-run`, and print libgomp's settings when torch loads it."""
    inherited = environment(folder)
    inherited.pop("OMP_WAIT_POLICY", None)
    return subprocess.run(
        [*COMMAND, "serve", "--dry-run", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**inherited, "OMP_DISPLAY_ENV": "verbose", **environ},
    )


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run a dry run of a checkpoint with truncated weights, and print its imports."""
    folder = tmp_path_factory.mktemp("truncated")
    make_damaged(folder / "model", "truncated")
    flags = (str(folder / "model"), "--max-model-len", "512")
    return dry_run(folder, *flags, PYTHONPROFILEIMPORTTIME="1")


def test_dry_run_loads_no_weights(truncated: subprocess.CompletedProcess[str]) -> None:
    for part in (
        "Qwen3ForCausalLM",
        "max_model_len: 512",
        "num_pages",
        "group_full_bytes_per_token: ",
        "attention",
        "processes: one process",
    ):
        assert part in truncated.stdout
    assert " torch\n" in truncated.stderr
    # Importing torch's compiler would double the time of a dry run.
    assert "torch._dynamo" not in truncated.stderr


def spin_count(done: subprocess.CompletedProcess[str]) -> int:
    (spins,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return int(spins)


def test_idle_threads_sleep(truncated: subprocess.CompletedProcess[str]) -> None:
    assert spin_count(truncated) == 0


@pytest.mark.release
def test_idle_threads_spin_if_configured(tmp_path: Path) -> None:
    assert spin_count(dry_run(tmp_path, OMP_WAIT_POLICY="active")) > 0


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        # A checkpoint of the wrong shape tests an error of the engine's process by default.
        pytest.param("--kv-cache-memory 1PB", "--kv-cache-memory", marks=pytest.mark.release),
        pytest.param(
            "--max-num-batched-tokens 5", "--chunked-prefill-size", marks=pytest.mark.release
        ),
        ("--host 1.2.3.4", "1.2.3.4"),
    ],
)
def test_impossible_setting_is_named(tmp_path: Path, flags: str, name: str) -> None:
    status, err = run_command(
        tmp_path, "serve", "--port", "0", "--log-level", "warning", *flags.split()
    )
    assert status == 2
    assert err.startswith("tokenspeed: ")
    assert name in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_hook_changes_settings_of_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from tokenspeed_core.api import hookimpl\n"
        "@hookimpl\n"
        "def adjust_config(config):\n"
        "    return {'api_workers': 2, 'host': '127.0.0.2', 'log_level': 'error'}\n"
    )
    entries, modules = {"setting": "setting_hooks [api1]"}, {"setting_hooks": source}
    write_plugin(tmp_path / "site", "setting", "hooks", entries, modules)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with served(tmp_path) as running:
        commands = [child.cmdline() for child in psutil.Process(running.process.pid).children()]
        assert sorted(command[3] for command in commands) == [
            "tokenspeed_core.engine.process",
            "tokenspeed_server.isolated_template",
            "tokenspeed_server.serve",
        ]
        assert running.url.startswith("http://127.0.0.2:")
        with running.http() as http:
            request = {"prompt": "a", "max_tokens": 3}
            assert http.post("/v1/completions", json=request).status_code == 200
        later = running.stderr().partition("plugin setting:setting set --log-level")[2]
        assert "INFO" not in later
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0


# By default, the test above starts two workers, and a test of the command computes their default number.
@pytest.mark.release
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ["isolated_template", "process", "serve"]),
        ("--api-workers 1", ["isolated_template", "process"]),
    ],
)
def test_number_of_api_workers_depends_on_processors(
    tmp_path: Path, many_processors: None, flags: str, expected: list[str]
) -> None:
    with served(tmp_path, *flags.split()) as running, running.http() as http:
        commands = [child.cmdline() for child in psutil.Process(running.process.pid).children()]
        assert sorted(command[3].rpartition(".")[2] for command in commands) == expected
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
        )
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.release),
        pytest.param(signal.SIGKILL, marks=pytest.mark.release),
    ],
)
def test_interrupted_start_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    starting = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    )
    server = psutil.Process(starting.pid)
    while not (
        engines := [
            each for each in server.children() if "tokenspeed_core.engine.process" in each.cmdline()
        ]
    ):
        time.sleep(0.01)
    time.sleep(0.3)  # The engine is importing modules.
    starting.send_signal(number)
    out, err = starting.communicate(timeout=60)
    assert starting.returncode == (-number if number == signal.SIGKILL else 0)
    assert (out, "Traceback" in err) == ("", False)
    _, alive = psutil.wait_procs(engines, 30)
    assert not alive
    if number != signal.SIGKILL:  # a killed server cannot remove the folder of its sockets
        assert not list(tmp_path.iterdir())


@pytest.mark.release
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_full_log_disk_does_not_stop_the_server(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Path("/dev/full").open("w") as full:
        server = subprocess.Popen(
            [*COMMAND, "serve", "--port", str(port)],
            stdout=full,
            stderr=full,
            env=environment(tmp_path),
        )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        wait_until(lambda: is_healthy(http), 120, "healthy")
        ask = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
        answer = Background(lambda: http.post("/v1/completions", json=ask).json())
        wait_for_work(engine_of(server.pid))
        server.send_signal(signal.SIGTERM)
        assert answer.result()["usage"]["completion_tokens"] == 1000
    assert server.wait(60) == 0


def is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False
