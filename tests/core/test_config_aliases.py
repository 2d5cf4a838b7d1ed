"""Launch lines of other engines: flags that may stay, flags that are explained, other spellings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.cli.app import main
from tokenspeed_core.config.build import unknown
from tokenspeed_core.config.flag_aliases import ACCEPTED, ACCEPTED_WITH_VALUE
from tokenspeed_core.config.sources import load, without_settings
from tokenspeed_core.errors import ConfigError

# Flags of SGLang's and vLLM's servers.
FOREIGN = """
add-special-tokens admin-api-key allow-auto-truncate allow-credentials allowed-methods base-gpu-id
bucket-e2e-request-latency calculate-kv-scales chat-template-content-format collect-detailed-traces
compilation-config config-format context-length convert cpu-offload-gb cuda-graph-bs cuda-graph-max-bs
data-parallel-backend decode-attention-backend deepep-mode disable-cascade-attn disable-cuda-graph
disable-custom-all-reduce disable-frontend-multiprocessing disable-log-stats disable-overlap-schedule
disable-radix-cache disable-uvicorn-access-log disaggregation-mode distributed-executor-backend
draft-tensor-parallel-size dp-size enable-deterministic-inference enable-dp-attention enable-eplb enable-hierarchical-cache enable-lora
enable-log-outputs enable-mixed-chunk enable-p2p-check enable-priority-scheduling enable-reasoning
enable-return-hidden-states enable-sleep-mode enable-torch-compile ep-num-redundant-experts eplb-algorithm
fastapi-root-path fully-sharded-loras generation-config guided-decoding-backend hf-chat-template-name
hicache-ratio hicache-write-policy is-embedding json-model-override-args kv-cache-memory-bytes
kv-cache-metrics kv-transfer-config limit-mm-per-prompt load-balance-method log-requests-level lora-backend
lora-modules lora-paths mamba-cache-dtype mamba-ssm-dtype max-log-len max-lora-rank max-loras-per-batch
max-mamba-cache-size max-num-batched-tokens max-running-requests max-seq-len-to-capture mem-fraction-static
mm-attention-backend mm-processor-kwargs model-impl model-path moe-a2a-backend moe-dense-tp-size
moe-runner-backend nccl-port num-continuous-decode-steps num-gpu-blocks-override num-redundant-experts
otlp-traces-endpoint override-generation-config page-size pipeline-parallel-size pp-size
prefill-attention-backend random-seed rope-scaling runner sampling-defaults schedule-conservativeness
scheduling-policy skip-server-warmup speculative-algo speculative-draft-attention-backend speculative-eagle-topk speculative-model
speculative-token-map ssl-ca-certs
structured-outputs-config task tokenizer-path tokenizer-worker-num tool-parser-plugin torch-compile-max-bs
tp-size triton-attention-num-kv-splits uvicorn-log-level watchdog-timeout
""".split()


@pytest.mark.parametrize("name", FOREIGN[1:])
def test_flag_of_another_engine_is_explained(name: str) -> None:
    if name.replace("-", "_") not in ServerConfig.model_fields:
        message = unknown(ServerConfig, name.replace("-", "_"), f"--{name}")
        assert "did you mean" not in message
        assert "--help" not in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("speculative-algoritm", "speculative-algorithm"),
        ("data-paralel-size", "data-parallel-size"),
        ("data-parallel-sise", "data-parallel-size"),
    ],
)
def test_misspelled_setting_of_a_topic_is_corrected(written: str, meant: str) -> None:
    message = unknown(ServerConfig, written.replace("-", "_"), f"--{written}")
    assert f"did you mean --{meant}" in message


def test_keys_of_a_json_setting_are_no_flags() -> None:
    message = unknown(ServerConfig, "speculative_config.method", "--speculative-config.method")
    assert "--speculative-config alone" in message


def test_needless_flags_may_stay(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("async-scheduling: true\nport: 5\n")
    with caplog.at_level(logging.WARNING, "tokenspeed.config"):
        config = load(
            ServerConfig, {"enable_auto_tool_choice": True, "swap_space": "4"}, {}, str(file)
        )
    assert config.model_dump() == ServerConfig(port=5).model_dump()
    said = [record.getMessage() for record in caplog.records]
    for name in ("--async-scheduling", "--enable-auto-tool-choice", "--swap-space"):
        assert len([line for line in said if line.startswith(name)]) == 1


@pytest.mark.parametrize("name", [*ACCEPTED, *ACCEPTED_WITH_VALUE])
def test_needless_setting_is_refused_as_keyword_and_if_false(name: str) -> None:
    assert name not in ServerConfig.model_fields
    for given in (
        lambda: ServerConfig.from_keywords(**{name: True}),
        lambda: load(ServerConfig, {name: False}, {}),
    ):
        with pytest.raises(ConfigError, match="not needed"):
            given()


@pytest.mark.parametrize(
    ("setting", "given", "meant"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "fp16", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "float", "float32"),
        ("kv_cache_dtype", "fp8", "fp8_e4m3"),
        ("max_model_len", "32k", 32_000),  # as vLLM reads them
        ("max_model_len", "32K", 32_768),
        ("max_model_len", "25.6k", 25_600),
        ("max_model_len", "1M", 1_048_576),
        ("max_total_tokens", "2m", 2_000_000),
        ("chunked_prefill_size", "4K", 4096),
        ("chunked_prefill_size", "-1", -1),
        ("max_prefill_tokens", "16k", 16_000),
    ],
)
def test_other_spellings_of_values(setting: str, given: str, meant: object) -> None:
    assert getattr(ServerConfig.from_keywords(**{setting: given}), setting) == meant


@pytest.mark.parametrize("given", ["k", "32kb", "1.2345k", "-4k", "0k", "32 k", "9999999999k"])
def test_wrong_token_counts_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        ServerConfig.from_keywords(max_model_len=given)


def test_variable_names_the_configuration_file(tmp_path: Path) -> None:
    file, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    file.write_text("port: 1\nseed: 1\n")
    other.write_text("port: 2\n")
    environ = {"TOKENSPEED_CONFIG": str(file), "TOKENSPEED_SEED": "3"}
    config = load(ServerConfig, {}, environ)
    assert (config.port, config.seed, config.origin("port")) == (1, 3, str(file))
    assert load(ServerConfig, {}, environ, str(other)).port == 2
    assert "TOKENSPEED_CONFIG" not in without_settings(environ)
    with pytest.raises(ConfigError, match="TOKENSPEED_CONFIG"):
        load(ServerConfig, {}, {"TOKENSPEED_CONFIG": str(tmp_path / "missing")})


def test_mistyped_variable_gets_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tokenspeed.config"):
        load(ServerConfig, {}, {"TOKENSPEED_PROT": "80", "TOKENSPEED_CONFIG": ""})
    (record,) = caplog.records
    assert "TOKENSPEED_PROT" in record.getMessage()
    assert "TOKENSPEED_PORT" in record.getMessage()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-v"], "--version"),
        (["-tp", "8"], "-tp: write --tensor-parallel-size"),
        (["-dp", "2"], "-dp: write --data-parallel-size"),
        (["-ep"], "-ep: write --enable-expert-parallel"),
        (["-sc", "{}"], "-sc: write --speculative-config"),
        (["-pp", "2"], "-pp: not supported yet"),
        (["-q", "fp8"], "--quantization"),
        (["-O3"], "-O3: no such option"),
        (["--api-key", "--port", "8633"], "--api-key: expected a value, found --port"),
    ],
)
def test_odd_words_are_quoted_as_typed(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "---" not in message
