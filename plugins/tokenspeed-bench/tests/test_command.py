"""The command: arguments, errors, output and files."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from misbehaving import Exchange, good, serving
from tokenspeed_bench import result as results
from tokenspeed_bench import server, supervised, targets
from tokenspeed_bench.command import VERBS, bench
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.flags import keywords
from tokenspeed_bench.options import loads_of, parse, traffics_of

import tokenspeed_core
from tokenspeed_core.cli import main


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, dict[str, Any]]]:
    """Replace `LLM` and return the arguments of each construction."""
    made: list[tuple[str | None, dict[str, Any]]] = []

    def make(model: str | None = None, **settings: Any) -> FakeLLM:
        made.append((model, settings))
        return FakeLLM()

    monkeypatch.setitem(tokenspeed_core.__dict__, "LLM", make)
    return made


def refusal(*words: str) -> str:
    with pytest.raises(BenchError) as got:
        bench(words)
    assert "\n" not in str(got.value)
    return str(got.value)


@pytest.mark.slow
def test_measurement_prints_figures_and_writes_files(
    llms: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = tmp_path / "x.json", tmp_path / "x.svg"
    assert (
        bench(
            [
                "latency",
                "some/model",
                "--repeats",
                "2",
                "--max-num-seqs",
                "8",
                "--enforce-eager",
                "--input-len",
                "16",
                "--json",
                str(data),
                "--plot",
                str(picture),
            ]
        )
        == 0
    )
    assert llms == [("some/model", {"max_num_seqs": "8", "enforce_eager": True})]
    result = json.loads(data.read_text())
    assert (result["kind"], result["model"]) == ("offline", "some/model")
    assert result["runs"][1]["traffic"] == {"name": "latency", "in_len": 16, "out_len": 256}
    assert len(result["runs"][1]["repeats_s"]) == 2
    assert picture.read_text().startswith("<svg")
    printed = capsys.readouterr().out
    assert "latency: in len 16, out len 256" in printed
    assert "kernels: attention fake, other" in printed


def test_json_on_stdout_is_the_only_output(
    llms: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(["latency", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == 1
    assert "latency:" in captured.err


def test_model_may_be_a_flag(llms: list[Any]) -> None:
    assert bench(["latency", "--model", "some/model"]) == 0
    assert llms == [("some/model", {})]


def test_shape_directory_is_temporary(llms: list[Any]) -> None:
    assert bench(["throughput", "--shape", "qwen3-0.6b", "--requests", "3"]) == 0
    ((folder, settings),) = llms
    assert folder is not None
    assert settings == {"load_format": "dummy"}
    assert Path(folder).name == "qwen3-0.6b"
    assert not Path(folder).exists()


def test_skipped_traffic_exits_with_1(llms: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["all", "--requests", "2", "--input-len", "20000", "--output-len", "4"]) == 1
    captured = capsys.readouterr()
    assert "latency was left out: the context is 10000" in captured.err
    assert "agentic:" in captured.out


def test_running_server_is_measured_by_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    with serving(good) as fake:
        status = bench(
            [
                "serve",
                "--url",
                f"{fake.url}/v1",
                "--users",
                "1,3",
                "--requests",
                "4,6",
                "--input-len",
                "12",
                "--output-len",
                "5",
                "--procs",
                "2",
                "--goodput",
                "ttft:5000",
                "itl:5000",
                "--api-key",
                "k",
                "--json",
                str(path),
                "--plot",
                str(tmp_path / "x.svg"),
            ]
        )
    assert status == 0
    result = json.loads(path.read_text())
    assert result["model"] == "fake"
    first, one, three = result["runs"]
    assert first["traffic"] == {"name": "first"}
    assert (one["pace"]["users"], three["pace"]["users"]) == (1, 3)
    assert three["figures"]["answered"] == 6
    assert three["figures"]["good_share"] == 1.0
    assert three["figures"]["cached_tokens"] > 0
    assert three["client"]["users"] == 3
    assert {exchange.headers["authorization"] for exchange in fake.exchanges} == {"Bearer k"}
    assert not any("cache_salt" in exchange.body for exchange in fake.exchanges), (
        "OpenAI has no such field"
    )
    assert "the client alone" in capsys.readouterr().out


def test_failed_requests_are_counted_and_exit_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def every_third_fails(exchange: Exchange) -> None:
        if exchange.number >= 9 and exchange.number % 3 == 0:
            exchange.refuse("500 Oops", "the device is gone")
        else:
            await good(exchange)

    with serving(every_third_fails) as fake:
        status = bench(
            [
                "serve",
                "--url",
                fake.url,
                "--users",
                "1",
                "--requests",
                "6",
                "--no-client-cost",
                "--goodput",
                "ttft:60000",
            ]
        )
    assert status == 1
    printed = capsys.readouterr().out
    assert "4 answered, 2 failed" in printed
    assert "goodput (ttft:60000): 66.7 % of requests" in printed, "a failed request meets no goal"
    assert "failed 2 times: 500 Oops: the device is gone" in printed


def test_unusable_server_is_reported_in_one_line() -> None:
    async def refuses(exchange: Exchange) -> None:
        exchange.refuse("401 Unauthorized", "missing or wrong API key")

    with serving(refuses) as fake:
        printed = refusal("serve", "--url", fake.url)
    assert (
        printed
        == f"{fake.url} does not answer completions of token ids: 401 Unauthorized: missing or wrong API key"
    )


def test_rejected_token_ids_are_replaced_by_smaller_ids() -> None:
    async def small(exchange: Exchange) -> None:
        if max(exchange.body["prompt"]) >= 1_500:
            exchange.refuse("400 Bad Request", "token ids must be below 1500")
        else:
            await good(exchange)

    with serving(small) as fake:
        assert (
            bench(
                ["serve", "--url", fake.url, "--users", "1", "--requests", "2", "--no-client-cost"]
            )
            == 0
        )
    assert max(fake.exchanges[-1].body["prompt"]) < 1_500


def test_local_server_bypasses_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it caches the proxies of the first call
    with serving(good) as fake:
        assert server.Api(fake.url).model() == "fake"


def test_quoted_server_log_omits_health_polls() -> None:
    with tempfile.TemporaryFile() as log:
        log.write(
            b"no room for the weights\n" + b'127.0.0.1:40794 - "GET /ready HTTP/1.1" 503\n' * 30
        )
        log.flush()
        assert server._last_lines(log) == "no room for the weights"


def test_failed_server_start_quotes_its_output() -> None:
    with (
        pytest.raises(
            BenchError,
            match=r"ended with status 2\. Its output:\n(.*\n)*.*--max-num-sex: no such setting",
        ),
        server.started(["--max-num-sex", "3"], None),
    ):
        raise AssertionError("it started")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("latncy",), "latncy"),
        (("nonsense",), "nonsense"),
        (("latency", "--repeat", "3"), "did you mean --repeats?"),
        (("latency", "--repeats", "0"), "must be at least 1"),
        (("latency", "--repeats", "x"), "invalid number value: 'x'"),
        (
            ("latency", "--requests", "3"),
            "--requests",
        ),
        (("latency", "m", "--shape", "qwen3-8b"), "--shape qwen3-8b"),
        (("latency", "m", "--model", "n"), "--model n"),
        (
            ("serve", "--shape", "qwen3-8b", "--model", "n"),
            "--model n",
        ),
        (("latency", "--dry-run"), "--dry-run"),
        (("serve", "--dry-run"), "--dry-run"),
        (("anchors", "--dry-run"), "--dry-run"),
        (
            ("serve", "--url", "h", "--profile", "x"),
            "--profile",
        ),
        (("serve", "--profile", "/no/such/folder/x"), "/no/such/folder"),
        (
            ("latency", "--goodput", "ttft:3"),
            "--goodput",
        ),
        (
            ("latency", "--users", "3"),
            "--users",
        ),
        (("latency", "--url=h"), "--url"),
        (("all", "--fixed"), "--fixed"),
        (
            ("anchors", "--shape", "qwen3-8b"),
            "--shape",
        ),
        (("latency", "--config", "x.yaml"), "--config: only for `tokenspeed bench serve`"),
        (("latency", "--shape", "gpt-9"), "invalid choice: 'gpt-9'"),
        (("latency", "--seed", "1", "--seed", "2"), "--seed: given twice"),
        (("latency", "--seed", "1", "m"), "m: "),
        (("latency", "--json", "/no/such/folder/x"), "/no/such/folder"),
        (("latency", "--plot", "x.png"), "x.png: plots are SVG"),
        (("all", "--traffic", "latency,naps"), "--traffic naps"),
        (("serve", "--url", "ftp://x"), "must begin with http"),
        (("serve", "--url", "h", "--max-num-seqs", "3"), "--url"),
        (("serve", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
        (("serve", "--port", "1"), "on a free port"),
        (
            ("serve", "--users", "1,2", "--requests", "1,2,3"),
            "users",
        ),
        (("serve", "--users", "4", "--request-rate", "2"), "--request-rate"),
        (("serve", "--goodput", "naps:3"), "one of ttft, itl, tpot, e2e"),
        (("serve", "--traffic", "agents", "--fixed"), "--fixed"),
        (("serve", "--turns", "3"), "--turns"),
        (("agents", "--first-len", "10", "--shared-len", "10"), "must be below --first-len"),
        (("anchors", "--groups", "bf17"), "bf17"),
        (("anchors", "some/model"), "some/model"),
        (("compare", "/no/a.json", "/no/b.json"), "No such file"),
    ],
)
def test_usage_error_names_the_option(words: tuple[str, ...], printed: str) -> None:
    assert printed in refusal(*words)


def test_flags_of_serve_become_keywords() -> None:
    words = [
        "--max-num-seqs",
        "8",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--chunked-prefill-size",
        "-1",
        "--attention-backend",
        "a,b",
        "--attention-backend.decode",
        "c",
        '--hf-overrides={"x": 1}',
        "--kernel-backend",
        "greedy=torch",
        "--kernel-backend=attention.0-3=a,b",
    ]
    assert keywords(words) == {
        "max_num_seqs": "8",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "chunked_prefill_size": "-1",
        "attention_backend": {"default": "a,b", "decode": "c"},
        "hf_overrides": '{"x": 1}',
        "kernel_backend": "greedy=torch attention.0-3=a,b",
    }


def test_default_loads_match_the_baselines() -> None:
    options, _ = parse("serve", [])
    loads = loads_of(options)
    assert [
        (each.pace.users, len(each.traffic.sessions), each.traffic.parameters["in_len"])
        for each in loads
    ] == [
        (1, 16, 128),
        (64, 512, 256),
        (256, 2048, 256),
    ]


def test_rate_applies_to_every_session() -> None:
    options, _ = parse("serve", ["--request-rate", "3.5", "--requests", "40"])
    (one,) = loads_of(options)
    assert one.pace.rate == 3.5
    assert len(one.traffic.sessions) == 40


def test_all_passes_each_traffic_its_options() -> None:
    options, _ = parse("all", ["--requests", "3", "--input-len", "9", "--sessions", "2"])
    latency, throughput, prefill, agentic = traffics_of(
        options, ("latency", "throughput", "prefill", "agentic")
    )
    assert latency.parameters == {"in_len": 9, "out_len": 256}
    assert throughput.parameters == {"num_requests": 3, "in_len": 9, "out_len": 256}
    assert prefill.parameters["num_requests"] == 3
    assert agentic.parameters["num_sessions"] == 2


def test_anchors_show_every_row_or_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_group(group: str, *given: Any) -> tuple[dict[str, Any] | None, int]:
        if group == "fp8":
            return None, 2
        run = {
            "traffic": {"name": "latency", "in_len": 128, "out_len": 256},
            "figures": {"ms_per_output": 4.1},
        }
        slow = {
            "traffic": {"name": "start"},
            "figures": {"s": 10.0, "first_over_median": 2.0, "event_share": 0.98},
        }
        return {
            "kind": "offline",
            "shape": "qwen3-8b",
            "device": "NVIDIA H200",
            "runs": [run, slow],
        }, 0

    monkeypatch.setattr(targets, "measure_group", measure_group)
    path = tmp_path / "x.json"
    assert bench(["anchors", "--groups", "bf16,fp8", "--json", str(path)]) == 1
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if line.startswith("qwen3-8b")]) == 8
    assert "must" in next(line for line in printed.splitlines() if "latency" in line)
    assert "ended with status 2" in printed
    assert "condition not met: qwen3-8b start: the first request took 2.00 times" in printed
    assert "condition not met: qwen3-8b start: 98.0 %" in printed
    assert "measured on" not in printed
    result = json.loads(path.read_text())
    (latency,) = [row for row in result["rows"] if row["row"] == "qwen3-8b latency"]
    assert (latency["value"], latency["verdict"], latency["ratio"]) == (
        4.1,
        "must",
        round(4.1 / 3.37, 3),
    )
    assert bench(["compare", str(path), str(path)]) == 0


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "compare"])
def test_each_subcommand_shows_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([verb, "--help"]) == 0
    assert "--json FILE" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(sys.argv[1:]);"
        "print('HEAVY', *(n for n in ('torch', 'numpy', 'tokenizers', 'tokenspeed_bench') if n in sys.modules));"
        "sys.exit(status)"
    )
    top = subprocess.check_output([sys.executable, "-c", code, "--help"], text=True)
    assert "  Measure an engine" in top
    assert top.splitlines()[-1] == "HEAVY"
    ours = subprocess.check_output([sys.executable, "-c", code, "bench", "--help"], text=True)
    assert "throughput" in ours
    assert ours.splitlines()[-1] == "HEAVY tokenspeed_bench"


def test_usage_error_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "latency", "--repeats", "0"]) == 2
    assert capsys.readouterr().err.startswith(
        "tokenspeed: argument --repeats: 0 must be at least 1"
    )


def test_rows_of_another_device_are_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = {"kind": "offline", "shape": "qwen3-8b", "device": "CPU (2 threads)", "runs": []}
    monkeypatch.setattr(targets, "measure_group", lambda *given: (part, 0))
    monkeypatch.setattr(results, "_gpus", lambda: None)
    assert bench(["anchors", "--groups", "bf16"]) == 0
    captured = capsys.readouterr()
    assert "condition not met: measured on CPU (2 threads)" in captured.out
    assert "the targets were measured on H200s, but this machine has no GPU" in captured.err


def test_anchors_write_one_plot_and_json_to_stdout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = (
        "import json, sys; print('a run'); run = {'traffic': {'name': 'latency'}, 'figures': {'s': 1}};"
        "part = {'schema': 1, 'kind': 'offline', 'shape': 's', 'device': 'H200', 'runs': [run | {'repeats_s': [1]}]};"
        "json.dump(part, open(sys.argv[-1], 'w'))"
    )
    monkeypatch.setattr(
        supervised,
        "start",
        lambda words, **more: subprocess.Popen(
            [sys.executable, "-c", child, *words],
            stdin=subprocess.PIPE,
            env=more["env"],
            stdout=more["stdout"].fileno(),
        ),
    )
    script = tmp_path / "err"
    with script.open("w+") as err:
        monkeypatch.setattr(sys, "stderr", err)
        assert (
            bench(
                [
                    "anchors",
                    "--groups",
                    "bf16,moe",
                    "--json",
                    "-",
                    "--plot",
                    str(tmp_path / "x.svg"),
                ]
            )
            == 0
        )
    assert [part["group"] for part in json.loads(capsys.readouterr().out)["results"]] == [
        "bf16",
        "moe",
    ]
    assert script.read_text().count("a run") == 2
    picture = (tmp_path / "x.svg").read_text()
    assert "bf16 latency: best 1.000 s" in picture
    assert "moe latency: best 1.000 s" in picture
