"""The configuration: where values come from, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tokenspeed_core.config import Config
from tokenspeed_core.config.flag_aliases import TABLES
from tokenspeed_core.config.schema import flag, narrowed
from tokenspeed_core.config.sources import load, without_settings
from tokenspeed_core.errors import ConfigError


def refusal(**keywords: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_keywords(**keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flags_go_before_the_environment_before_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nseed: 1\n")
    environ = {"TOKENSPEED_PORT": "2", "TOKENSPEED_MAX_NUM_SEQS": "2"}
    config = load({"port": "3"}, environ, str(file))
    assert (config.port, config.max_num_seqs, config.seed, config.block_size) == (3, 2, 1, None)
    origins = [config.origin(name) for name in ("port", "max_num_seqs", "seed", "block_size")]
    assert origins == ["--port", "TOKENSPEED_MAX_NUM_SEQS", str(file), "default"]


def test_a_value_out_of_bounds_is_refused_with_its_flag_value_bound_and_origin(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_num_seqs: 0\n")
    cases: list[tuple[Callable[[], Config], str]] = [
        (lambda: load({"max_num_seqs": "0"}, {}), "--max-num-seqs 0: must be at least 1"),
        (
            lambda: load({}, {"TOKENSPEED_MAX_NUM_SEQS": "0"}),
            "--max-num-seqs 0 (from TOKENSPEED_MAX_NUM_SEQS): must be at least 1",
        ),
        (lambda: load({}, {}, str(file)), f"--max-num-seqs 0 (from {file}): must be at least 1"),
        (lambda: Config.from_keywords(max_num_seqs=0), "max_num_seqs 0: must be at least 1"),
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
        ("chunked_prefill_size", "0", "must be at least 1, or -1 to turn chunking off"),
        ("chunked_prefill_size", "-2", "must be at least 1, or -1 to turn chunking off"),
        ("dtype", "bfloat", "did you mean bfloat16?"),
        ("kv_cache_memory", "2 bananas", "must be a size such as 2GB"),
        ("hf_overrides", "{", "must be JSON"),
        ("hf_overrides", "[1]", "must be a JSON object"),
        ("attention_backend", "", "must not be empty"),
        (
            "attention_backend",
            {"dekode": "a"},
            "--attention-backend.dekode does not exist; there is",
        ),
        ("sampling_backend", {"decode": "a"}, "there is --sampling-backend alone"),
        ("enable_prefix_caching", "perhaps", "must be true or false"),
        ("cudagraph_capture_sizes", "1,two", "must be a whole number"),
    ],
)
def test_what_a_setting_takes_is_said_when_it_is_given_something_else(
    name: str, value: object, expected: str
) -> None:
    assert expected in refusal(**{name: value})


def test_a_mistyped_setting_is_answered_with_the_nearest() -> None:
    assert refusal(max_num_seq=1) == "max_num_seq: no such setting; did you mean max_num_seqs?"
    with pytest.raises(ConfigError, match=r"--prt: no such setting; did you mean --port\?"):
        load({"prt": "1"}, {})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mem_fraction_static", "--gpu-memory-utilization"),
        ("max_running_requests", "--max-num-seqs"),
        ("context_length", "--max-model-len"),
        ("page_size", "--block-size"),
        ("model_path", "--model"),
        ("disable_radix_cache", "--no-enable-prefix-caching"),
        ("max_num_batched_tokens", "--chunked-prefill-size"),
        ("max_num_batched_tokens", "--max-total-tokens"),
        ("swap_space", "nothing is needed here: a preempted sequence is computed again"),
    ],
)
def test_the_names_of_other_engines_are_refused_with_ours(theirs: str, ours: str) -> None:
    assert ours in refusal(**{theirs: 1})


@pytest.mark.parametrize("name", ["tokenizer_mode", "tp", "kvstore_size", "no_enable_metrics"])
def test_a_setting_that_is_to_come_is_said_not_to_be_built_yet_and_no_other_is_meant(
    name: str,
) -> None:
    assert refusal(**{name: 1}) == f"{name}: not built yet"


def test_every_name_offered_in_place_of_a_foreign_one_exists() -> None:
    tables = yaml.safe_load(TABLES.read_text())
    for table in tables:
        assert table["names"] and not set(table["names"]) & set(Config.model_fields)
    for ours in tables[0]["names"].values():
        setting, _, key = ours.removeprefix("--").replace("-", "_").partition(".")
        assert setting in Config.model_fields
        assert not key or Config.from_keywords(**{setting: {key: "x"}})


def test_contradictions_are_refused() -> None:
    assert "give one" in refusal(max_total_tokens=64, kv_cache_memory="1GB")
    assert "above --max-cudagraph-capture-size 4" in refusal(
        cudagraph_capture_sizes=[1, 8], max_cudagraph_capture_size=4
    )


def test_backends_may_be_ordered_and_narrowed_from_different_sources() -> None:
    config = load({"attention_backend.decode": "fast"}, {"TOKENSPEED_ATTENTION_BACKEND": "b, c"})
    assert config.attention_backend == {"default": ("b", "c"), "decode": ("fast",)}
    only = load({}, {"TOKENSPEED_ATTENTION_BACKEND__DECODE": "fast"}).attention_backend
    assert only == {"default": ("auto",), "decode": ("fast",)}


NARROWED = ["attention_backend: {decode: b}\n", "attention-backend.decode: b\n"]
WHOLE = ["attention_backend: c\n", "attention_backend: {default: c}\n"]


@pytest.mark.parametrize(
    "text", [*NARROWED, WHOLE[0] + NARROWED[1], "attention_backend: {default: c, decode: b}\n"]
)
def test_a_setting_goes_before_what_a_later_source_narrows_it_to_however_that_is_spelled(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    narrowed = {"TOKENSPEED_ATTENTION_BACKEND__DECODE": "v"}
    for config in (
        load({"attention_backend": "a"}, narrowed, str(file)),
        load({"attention_backend": "a"}, {}, str(file)),
    ):
        assert config.attention_backend == {"default": ("a",)}
        assert config.origin("attention_backend") == "--attention-backend"


@pytest.mark.parametrize("narrowed", NARROWED)
def test_what_a_source_narrows_joins_what_later_ones_have_and_all_of_them_are_told(
    tmp_path: Path, narrowed: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(narrowed)
    config = load({"attention_backend.prefill": "a"}, {}, str(file))
    assert config.attention_backend == {"default": ("auto",), "prefill": ("a",), "decode": ("b",)}
    assert config.origin("attention_backend") == f"{file}, --attention-backend.prefill"
    file.write_text(narrowed + "attention-backend.prefill: c\n")
    config = load({"attention_backend.decode": "a"}, {}, str(file))
    assert config.origin("attention_backend") == f"{file}, --attention-backend.decode", (
        "what was typed comes last"
    )
    config = load(
        {"attention_backend.decode": "a"}, {"TOKENSPEED_ATTENTION_BACKEND": "v"}, str(file)
    )
    assert config.attention_backend == {"default": ("v",), "decode": ("a",)}
    assert (
        config.origin("attention_backend")
        == "TOKENSPEED_ATTENTION_BACKEND, --attention-backend.decode"
    )


def test_what_narrows_by_a_key_that_there_is_not_is_refused_with_where_it_stands(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("attention_backend: {dekode: a}")
    variable = "TOKENSPEED_ATTENTION_BACKEND__DEKODE"
    for given, origin in (
        (lambda: load({}, {}, str(file)), file),
        (lambda: load({}, {variable: "a"}), variable),
    ):
        with pytest.raises(ConfigError) as caught:
            given()
        there_is = f"there is {narrowed('attention_backend')}"
        assert (
            str(caught.value)
            == f"--attention-backend.dekode (from {origin}): no such setting; {there_is}"
        )


def test_pairs_come_from_repeated_flags_a_variable_a_file_or_a_mapping(tmp_path: Path) -> None:
    expected = {"greedy": ("torch",), "attention.decode": ("a", "b")}
    words = ["greedy=torch", "attention.decode=a,b"]
    file = tmp_path / "settings.yaml"
    file.write_text("kernel-backend: {greedy: torch, attention.decode: [a, b]}\n")
    for config in (
        load({"kernel_backend": words}, {}),
        load({}, {"TOKENSPEED_KERNEL_BACKEND": " ".join(words)}),
        load({}, {}, str(file)),
        Config.from_keywords(kernel_backend={"greedy": "torch", "attention.decode": "a,b"}),
    ):
        assert config.kernel_backend == expected
    assert load({"backend_option": ["fast.text=a b=c"]}, {}).backend_option == {
        "fast.text": "a b=c"
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["greedy"], "'greedy' must read NAME=VALUE"),
        (["a=1", "a=2"], "a stands there twice"),
        (["a="], "must read"),
        (["=a"], "must read"),
    ],
)
def test_a_pair_that_is_none_or_stands_there_twice_is_refused(words: list[str], said: str) -> None:
    for name in ("kernel_backend", "backend_option"):
        assert said in refusal(**{name: words})


def test_a_setting_that_cannot_be_narrowed_says_so() -> None:
    with pytest.raises(ConfigError, match=r"--port\.decode: no such setting"):
        load({"port.decode": "1"}, {})


def test_sizes_lists_and_json_are_read_from_text() -> None:
    environ = {
        "TOKENSPEED_KV_CACHE_MEMORY": "512MiB",
        "TOKENSPEED_CUDAGRAPH_CAPTURE_SIZES": "1, 2,4",
        "TOKENSPEED_HF_OVERRIDES": '{"rope_theta": 10000.0}',
        "TOKENSPEED_ENABLE_PREFIX_CACHING": "off",
        "TOKENSPEED_API_KEY": "",
    }
    config = load({}, environ)
    assert config.kv_cache_memory == 512 * 2**20
    assert load({"kv_cache_memory": "2GB"}, {}).kv_cache_memory == 2 * 10**9
    assert config.cudagraph_capture_sizes == (1, 2, 4)
    assert config.hf_overrides == {"rope_theta": 10000.0}
    assert config.enable_prefix_caching is False
    assert config.api_key is None


def test_a_variable_of_ours_that_is_no_setting_is_ignored_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert load({}, {"TOKENSPEED_MAX_NUM_SEQ": "3", "TOKENSPEED_PLUGINS": ""}).max_num_seqs == 256
    assert [record.message for record in caplog.records] == [
        "ignored: --max-num-seq (from TOKENSPEED_MAX_NUM_SEQ): no such setting; did you mean --max-num-seqs?"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file or directory"),
        ("a: [", "not YAML"),
        ("- a", "must be a mapping of settings, found a list"),
        ("port: 1\n--port: 2", "--port stands there twice"),
        ("moe_backend: {fp8: a}\nmoe-backend.fp8: b", "--moe-backend.fp8 stands there twice"),
        ("moe_backend: {default: a}\nmoe-backend: b", "--moe-backend stands there twice"),
        ("prot: 1", "did you mean --port?"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, str(file))
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_configuration_is_frozen_and_resolving_makes_a_new_one() -> None:
    config = Config.from_keywords(max_num_seqs=8, max_model_len=64)
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


def test_another_process_gets_the_same_configuration_and_its_origins() -> None:
    config = load(
        {
            "attention_backend.decode": "a,b",
            "cudagraph_capture_sizes": "1,2",
            "hf_overrides": '{"a": [1]}',
        },
        {"TOKENSPEED_KV_CACHE_MEMORY": "2GB"},
    )
    copy = Config.from_wire(json.loads(json.dumps(config.to_wire())))
    assert copy == config
    assert copy.origin("kv_cache_memory") == "TOKENSPEED_KV_CACHE_MEMORY"


def test_the_key_shows_in_no_error_and_no_representation() -> None:
    assert "s3cret" not in repr(Config.from_keywords(api_key="s3cret"))
    assert "s3cret" not in refusal(api_key=["s3cret"])
    assert "s3cret" not in refusal(api_key="s3cret", port=-1)


def test_a_child_that_gets_its_settings_otherwise_inherits_none() -> None:
    environ = {"TOKENSPEED_PORT": "1", "TOKENSPEED_PLUGINS": "-x", "HOME": "/root"}
    assert without_settings(environ) == {"TOKENSPEED_PLUGINS": "-x", "HOME": "/root"}


def test_every_setting_has_a_section_and_words() -> None:
    from tokenspeed_core.config.schema import SECTIONS, metadata

    for name, field in Config.model_fields.items():
        assert metadata(name)["section"] in SECTIONS, flag(name)
        assert field.description, flag(name)
