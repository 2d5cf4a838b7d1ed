"""The configuration: sources of values, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.config.flag_aliases import TABLES
from tokenspeed_core.config.settings import flag
from tokenspeed_core.config.sources import key_for_server, load, without_settings
from tokenspeed_core.errors import ConfigError


def refusal(**keywords: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_keywords(**keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_precedence_of_sources(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nseed: 1\n")
    environ = {"TOKENSPEED_PORT": "2", "TOKENSPEED_MAX_NUM_SEQS": "2"}
    config = load(ServerConfig, {"port": "3"}, environ, str(file))
    assert (config.port, config.max_num_seqs, config.seed, config.block_size) == (3, 2, 1, None)
    origins = [config.origin(name) for name in ("port", "max_num_seqs", "seed", "block_size")]
    assert origins == ["--port", "TOKENSPEED_MAX_NUM_SEQS", str(file), "default"]


def test_error_names_flag_value_rule_and_origin(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_num_seqs: 0\n")
    cases: list[tuple[Callable[[], ServerConfig], str]] = [
        (
            lambda: load(ServerConfig, {"max_num_seqs": "0"}, {}),
            "--max-num-seqs 0: must be at least 1",
        ),
        (
            lambda: load(ServerConfig, {}, {"TOKENSPEED_MAX_NUM_SEQS": "0"}),
            "--max-num-seqs 0 (from TOKENSPEED_MAX_NUM_SEQS): must be at least 1",
        ),
        (
            lambda: load(ServerConfig, {}, {}, str(file)),
            f"--max-num-seqs 0 (from {file}): must be at least 1",
        ),
        (lambda: ServerConfig.from_keywords(max_num_seqs=0), "max_num_seqs 0: must be at least 1"),
    ]
    for given, expected in cases:
        with pytest.raises(ConfigError) as caught:
            given()
        assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gpu_memory_utilization", "1.1", "must be at most 1"),
        ("gpu_memory_utilization", "0", "must be above 0"),
        ("gpu_memory_utilization", "nan", "must be a number"),
        ("port", "65536", "must be at most 65535"),
        ("port", "8o", "must be a whole number"),
        ("port", True, "--port takes a value, not true"),
        ("speculative_draft_model_quantization", "fp8", "must be one of auto, unquant"),
        ("speculative_draft_model_quantization", "unquant", "without --speculative-algorithm"),
        ("chunked_prefill_size", "0", "must be at least 1, or -1"),
        ("chunked_prefill_size", "-2", "must be at least 1, or -1"),
        ("dtype", "bfloat", "did you mean bfloat16?"),
        ("kv_cache_memory", "2 bananas", "must be a size such as 2GB"),
        ("hf_overrides", "{", "must be JSON"),
        ("hf_overrides", "[1]", "must be a JSON object"),
        ("attention_backend", "", "must not be empty"),
        (
            "attention_backend",
            {"dekode": "a"},
            "--attention-backend.dekode",
        ),
        ("sampling_backend", {"decode": "a"}, "--sampling-backend.decode"),
        ("enable_prefix_caching", "perhaps", "must be true or false"),
        ("cudagraph_capture_sizes", "1,two", "must be a whole number"),
        ("api_key", "", "must not be empty"),
        ("api_key", " , ", "must not be empty"),
        ("kv_events_config", '{"topics": "x"}', "topics is not a known key"),
        ("kv_events_config", '{"publisher": "kafka"}', "publisher must be 'zmq'"),
        ("kv_events_config", '{"endpoint": "5557"}', "tcp://HOST:PORT"),
    ],
)
def test_invalid_value_is_refused_with_the_rule(name: str, value: object, expected: str) -> None:
    assert expected in refusal(**{name: value})


def test_mistyped_setting_gets_a_suggestion() -> None:
    assert refusal(max_num_seq=1) == "max_num_seq: no such setting; did you mean max_num_seqs?"
    with pytest.raises(ConfigError, match=r"--prt: no such setting; did you mean --port\?"):
        load(ServerConfig, {"prt": "1"}, {})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mem_fraction_static", "--gpu-memory-utilization"),
        ("max_running_requests", "--max-num-seqs"),
        ("context_length", "--max-model-len"),
        ("page_size", "--block-size"),
        ("model_path", "--model"),
        ("dp", "--data-parallel-size"),
        ("ep", "--expert-parallel-size"),
        ("disable_radix_cache", "--no-enable-prefix-caching"),
        ("max_num_batched_tokens", "--chunked-prefill-size"),
        ("max_num_batched_tokens", "--max-total-tokens"),
        ("swap_space", "not needed"),
    ],
)
def test_names_of_other_engines_are_refused_with_ours(theirs: str, ours: str) -> None:
    assert ours in refusal(**{theirs: 1})


@pytest.mark.parametrize(
    "name", ["tokenizer_mode", "pp_size", "kvstore_size", "no_enable_lora", "enable_lora"]
)
def test_missing_feature_is_not_supported_yet(
    name: str,
) -> None:
    assert "not supported yet" in refusal(**{name: 1})


def test_every_alias_names_an_existing_setting() -> None:
    tables = yaml.safe_load(TABLES.read_text())
    for table in tables:
        assert table["names"] and not set(table["names"]) & set(ServerConfig.model_fields)
    for ours in tables[0]["names"].values():
        setting, _, key = ours.removeprefix("--").replace("-", "_").partition(".")
        assert setting in ServerConfig.model_fields
        assert not key or ServerConfig.from_keywords(**{setting: {key: "x"}})


def test_contradictions_are_refused() -> None:
    assert "--kv-cache-memory" in refusal(max_total_tokens=64, kv_cache_memory="1GB")
    assert "--max-cudagraph-capture-size 4" in refusal(
        cudagraph_capture_sizes=[1, 8], max_cudagraph_capture_size=4
    )


def test_backends_combine_keys_from_several_sources() -> None:
    config = load(
        ServerConfig, {"attention_backend.decode": "fast"}, {"TOKENSPEED_ATTENTION_BACKEND": "b, c"}
    )
    assert config.attention_backend == {"default": ("b", "c"), "decode": ("fast",)}
    only = load(
        ServerConfig, {}, {"TOKENSPEED_ATTENTION_BACKEND__DECODE": "fast"}
    ).attention_backend
    assert only == {"default": ("auto",), "decode": ("fast",)}


NARROWED = ["attention_backend: {decode: b}\n", "attention-backend.decode: b\n"]
WHOLE = ["attention_backend: c\n", "attention_backend: {default: c}\n"]


@pytest.mark.parametrize(
    "text", [*NARROWED, WHOLE[0] + NARROWED[1], "attention_backend: {default: c, decode: b}\n"]
)
def test_setting_overrides_keys_of_weaker_sources(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    narrowed = {"TOKENSPEED_ATTENTION_BACKEND__DECODE": "v"}
    for config in (
        load(ServerConfig, {"attention_backend": "a"}, narrowed, str(file)),
        load(ServerConfig, {"attention_backend": "a"}, {}, str(file)),
    ):
        assert config.attention_backend == {"default": ("a",)}
        assert config.origin("attention_backend") == "--attention-backend"


@pytest.mark.parametrize("narrowed", NARROWED)
def test_keys_of_several_sources_are_merged(tmp_path: Path, narrowed: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(narrowed)
    config = load(ServerConfig, {"attention_backend.prefill": "a"}, {}, str(file))
    assert config.attention_backend == {"default": ("auto",), "prefill": ("a",), "decode": ("b",)}
    assert config.origin("attention_backend") == f"{file}, --attention-backend.prefill"
    file.write_text(narrowed + "attention-backend.prefill: c\n")
    config = load(ServerConfig, {"attention_backend.decode": "a"}, {}, str(file))
    assert config.origin("attention_backend") == f"{file}, --attention-backend.decode", (
        "the command line comes last"
    )
    config = load(
        ServerConfig,
        {"attention_backend.decode": "a"},
        {"TOKENSPEED_ATTENTION_BACKEND": "v"},
        str(file),
    )
    assert config.attention_backend == {"default": ("v",), "decode": ("a",)}
    assert (
        config.origin("attention_backend")
        == "TOKENSPEED_ATTENTION_BACKEND, --attention-backend.decode"
    )


def test_unknown_key_is_refused_with_its_origin(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("attention_backend: {dekode: a}")
    variable = "TOKENSPEED_ATTENTION_BACKEND__DEKODE"
    for given, origin in (
        (lambda: load(ServerConfig, {}, {}, str(file)), file),
        (lambda: load(ServerConfig, {}, {variable: "a"}), variable),
    ):
        with pytest.raises(ConfigError) as caught:
            given()
        assert f"--attention-backend.dekode (from {origin})" in str(caught.value)
        assert ServerConfig.narrowed("attention_backend") in str(caught.value)


def test_pairs_are_read_from_every_source(tmp_path: Path) -> None:
    expected = {"greedy": ("torch",), "attention.decode": ("a", "b")}
    words = ["greedy=torch", "attention.decode=a,b"]
    file = tmp_path / "settings.yaml"
    file.write_text("kernel-backend: {greedy: torch, attention.decode: [a, b]}\n")
    for config in (
        load(ServerConfig, {"kernel_backend": words}, {}),
        load(ServerConfig, {}, {"TOKENSPEED_KERNEL_BACKEND": " ".join(words)}),
        load(ServerConfig, {}, {}, str(file)),
        ServerConfig.from_keywords(kernel_backend={"greedy": "torch", "attention.decode": "a,b"}),
    ):
        assert config.kernel_backend == expected
    assert load(ServerConfig, {"backend_option": ["fast.text=a b=c"]}, {}).backend_option == {
        "fast.text": "a b=c"
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["greedy"], "'greedy' must be NAME=VALUE"),
        (["a=1", "a=2"], "a is given twice"),
        (["a="], "must be"),
        (["=a"], "must be"),
    ],
)
def test_invalid_pair_is_refused(words: list[str], expected: str) -> None:
    for name in ("kernel_backend", "backend_option"):
        assert expected in refusal(**{name: words})


def test_setting_without_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--port\.decode: no such setting"):
        load(ServerConfig, {"port.decode": "1"}, {})


def test_sizes_lists_and_json_are_read_from_text() -> None:
    environ = {
        "TOKENSPEED_KV_CACHE_MEMORY": "512MiB",
        "TOKENSPEED_CUDAGRAPH_CAPTURE_SIZES": "1, 2,4",
        "TOKENSPEED_HF_OVERRIDES": '{"rope_theta": 10000.0}',
        "TOKENSPEED_ENABLE_PREFIX_CACHING": "off",
        "TOKENSPEED_SERVED_MODEL_NAME": "",
    }
    config = load(ServerConfig, {}, environ)
    assert config.kv_cache_memory == 512 * 2**20
    assert load(ServerConfig, {"kv_cache_memory": "2GB"}, {}).kv_cache_memory == 2 * 10**9
    assert config.cudagraph_capture_sizes == (1, 2, 4)
    assert config.hf_overrides == {"rope_theta": 10000.0}
    assert config.enable_prefix_caching is False
    assert config.served_model_name is None


def test_list_of_numbers_may_be_one_number(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("cudagraph_capture_sizes: 8\n")
    assert load(ServerConfig, {}, {}, str(file)).cudagraph_capture_sizes == (8,)


@pytest.mark.parametrize(
    "environ",
    [
        {"TOKENSPEED_API_KEY": ""},
        {"TOKENSPEED_API_KEY": " , "},
        {"TOKENSPEED_API_KEYS": "secret"},
        {"TOKENSPEED_APIKEY": "secret"},
    ],
)
def test_server_does_not_start_without_an_intended_key(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="TOKENSPEED_API_KEY") as caught:
        load(ServerConfig, {}, environ)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "environ", "expected"),
    [
        (None, {}, None),
        (None, {"TOKENSPEED_API_KEY": ""}, None),
        (None, {"TOKENSPEED_API_KEY": " one , two"}, "one"),
        ("three,four", {"TOKENSPEED_API_KEY": "one"}, "three"),
    ],
)
def test_commands_send_the_first_key(
    keys: str | None, environ: dict[str, str], expected: str | None
) -> None:
    assert key_for_server(keys, environ) == expected


def test_unknown_variable_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (
        load(
            ServerConfig, {}, {"TOKENSPEED_MAX_NUM_SEQ": "3", "TOKENSPEED_PLUGINS": ""}
        ).max_num_seqs
        == 256
    )
    (record,) = caplog.records
    assert "TOKENSPEED_MAX_NUM_SEQ:" in record.message
    assert "TOKENSPEED_MAX_NUM_SEQS?" in record.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file or directory"),
        ("a: [", "not YAML"),
        ("- a", "must be a mapping of settings, found a list"),
        ("port: 1\n--port: 2", "--port is given twice"),
        (
            "attention_backend: {decode: a}\nattention-backend.decode: b",
            "--attention-backend.decode",
        ),
        ("attention_backend: {default: a}\nattention-backend: b", "--attention-backend"),
        ("prot: 1", "did you mean --port?"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(ServerConfig, {}, {}, str(file))
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_is_frozen() -> None:
    config = ServerConfig.from_keywords(max_num_seqs=8, max_model_len=64)
    with pytest.raises(ValidationError):
        config.port = 1
    resolved = config.resolved(device="cpu", block_size=16, max_model_len=64)
    assert (config.device, resolved.device, resolved.block_size) == ("auto", "cpu", 16)
    assert [
        resolved.origin(name) for name in ("device", "max_num_seqs", "max_model_len", "port")
    ] == [
        "auto",
        "Python",
        "Python",
        "default",
    ]
    with pytest.raises(ValidationError):
        config.resolved(block_size=0)


def test_config_survives_the_wire() -> None:
    config = load(
        ServerConfig,
        {
            "attention_backend.decode": "a,b",
            "cudagraph_capture_sizes": "1,2",
            "hf_overrides": '{"a": [1]}',
        },
        {"TOKENSPEED_KV_CACHE_MEMORY": "2GB"},
    )
    copy = ServerConfig.from_wire(json.loads(json.dumps(config.to_wire())))
    assert copy == config
    assert copy.origin("kv_cache_memory") == "TOKENSPEED_KV_CACHE_MEMORY"


def test_api_key_is_never_shown() -> None:
    assert "s3cret" not in repr(ServerConfig.from_keywords(api_key="s3cret"))
    assert "s3cret" not in refusal(api_key=["s3cret"])
    assert "s3cret" not in refusal(api_key="s3cret", port=-1)


def test_child_inherits_no_settings() -> None:
    environ = {"TOKENSPEED_PORT": "1", "TOKENSPEED_PLUGINS": "-x", "HOME": "/root"}
    assert without_settings(environ) == {"TOKENSPEED_PLUGINS": "-x", "HOME": "/root"}


def test_every_setting_has_a_section_and_help() -> None:
    for name, field in ServerConfig.model_fields.items():
        assert ServerConfig.metadata(name)["section"] in ServerConfig.sections, flag(name)
        assert field.description, flag(name)


def test_every_help_text_is_one_short_sentence() -> None:
    for name, field in ServerConfig.model_fields.items():
        text = field.description or ""
        assert text[0].isupper(), flag(name)
        assert text.endswith("."), flag(name)
        assert len(text) <= 80, flag(name)


def test_odd_files_and_deep_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    for file in ("/dev/zero", str(tmp_path), str(tmp_path / "deep.yaml")):
        with pytest.raises(ConfigError):
            load(ServerConfig, {}, {}, file)
    with pytest.raises(ConfigError, match="hf-overrides"):
        load(ServerConfig, {"hf_overrides": '{"a":' * 5000}, {})
    with pytest.raises(ConfigError, match="hf-overrides"):
        load(ServerConfig, {"hf_overrides": '{"a":' + "9" * 5000 + "}"}, {})
