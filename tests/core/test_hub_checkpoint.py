"""Resolving a model name: paths, bundled names, families, load formats, and one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.api import Checkpoint, FullAttention, LoadFormat, ModelInfo, ModelSpec
from tokenspeed_core.checkpoint.resolve import (
    choose_format,
    merged,
    resolve_checkpoint,
    wanted_files,
)
from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError, ConfigError, PluginError
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.text.load import load_text

HERE = "plugin_under_test"
NOTHING = Path("/nonexistent")


def describe(config: Mapping[str, Any]) -> ModelInfo:
    if "vocab_size" not in config:
        raise ValueError("config.json: vocab_size is missing")
    return ModelInfo(
        "TinyForCausalLM",
        config["vocab_size"],
        8,
        "float32",
        1,
        10,
        (FullAttention("full", 1, 1, 4),),
        (2,),
        None,
    )


TINY = ModelSpec("TinyForCausalLM", f"{HERE}:describe", f"{HERE}:Tiny")
SAFE = LoadFormat("safetensors", f"{HERE}:read", ("*.safetensors", "*.safetensors.index.json"))
PT = LoadFormat("pt", f"{HERE}:read", ("*.bin", "*.bin.index.json"), by_name_only=True)
DUMMY = LoadFormat("dummy", f"{HERE}:read", ())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["TinyForCausalLM"],
                "vocab_size": 7,
                "rope_parameters": {"rope_theta": 5.0},
            }
        )
    )
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    return folder


@pytest.fixture
def catalog(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """Return a catalog with a family, a bundled checkpoint and three load formats of this module."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    monkeypatch.setitem(globals(), "BUNDLED", Checkpoint("demo", str(checkpoint), "a tiny one"))
    info = tmp_path / "site" / "tiny_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[tokenspeed.models]\nTinyForCausalLM = {HERE}:TINY [api1]\n"
        f"[tokenspeed.checkpoints]\ndemo = {HERE}:BUNDLED [api1]\n"
        f"[tokenspeed.load_formats]\nsafetensors = {HERE}:SAFE [api1]\npt = {HERE}:PT [api1]\n"
        f"dummy = {HERE}:DUMMY [api1]\n"
    )
    return Catalog.discover(
        Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")])
    )


def refusal(model: str, catalog: Catalog, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(Config(model=model, **options), catalog)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_path_and_bundled_name_find_the_checkpoint(catalog: Catalog, checkpoint: Path) -> None:
    for model in (str(checkpoint), "demo", None):
        found = resolve_checkpoint(Config(model=model), catalog)
        assert (found.path, found.info.vocab_size, found.spec) == (checkpoint, 7, TINY)
        assert found.generation == {"temperature": 0.6}


def test_home_of_unknown_user_is_rejected(catalog: Catalog, checkpoint: Path) -> None:
    assert "~nobody-has-this-name/m" in refusal("~nobody-has-this-name/m", catalog)
    with pytest.raises(
        CheckpointError, match="--tokenizer ~nobody-has-this-name: no such directory"
    ):
        load_text(Config(tokenizer="~nobody-has-this-name"), checkpoint)


def test_overrides_are_merged_before_the_family_reads_them(catalog: Catalog) -> None:
    overrides = {"vocab_size": 9, "rope_parameters": {"factor": 2.0}}
    found = resolve_checkpoint(Config(model="demo", hf_overrides=overrides), catalog)
    assert found.info.vocab_size == 9
    assert found.config["rope_parameters"] == {"rope_theta": 5.0, "factor": 2.0}
    assert merged({"a": {"b": 1}}, {"a": None}) == {"a": None}


def test_missing_path_suggests_a_bundled_name(catalog: Catalog) -> None:
    assert refusal("./demo", catalog).endswith("./demo; did you mean demo?")
    assert refusal("/no/such/folder", catalog).endswith("/no/such/folder")


def test_file_is_not_a_checkpoint(catalog: Catalog, checkpoint: Path) -> None:
    assert "give the directory" in refusal(str(checkpoint / "config.json"), catalog)
    (checkpoint / "model.gguf").touch()
    assert "GGUF" in refusal(str(checkpoint / "model.gguf"), catalog)


def test_unreadable_config_is_refused(catalog: Catalog, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{oops")
    assert "config.json" in refusal("demo", catalog)
    (checkpoint / "config.json").write_text("[]")
    assert "must contain a JSON object, found a list" in refusal("demo", catalog)
    (checkpoint / "config.json").unlink()
    assert "no config.json" in refusal("demo", catalog)
    (checkpoint / "config.json").symlink_to("config.json")
    assert refusal("demo", catalog).count(str(checkpoint)) == 1


def test_unknown_architecture_lists_installed_families(catalog: Catalog, checkpoint: Path) -> None:
    message = refusal("demo", catalog, hf_overrides={"architectures": ["TinyForCausalML"]})
    assert "did you mean TinyForCausalLM?" in message
    assert "installed: TinyForCausalLM" in message
    other = refusal("demo", catalog, hf_overrides={"architectures": ["FooForCausalLM"]})
    assert "did you mean" not in other
    assert "no architectures" in refusal("demo", catalog, hf_overrides={"architectures": None})
    nested = refusal("demo", catalog, hf_overrides={"architectures": [["Tiny"]]})
    assert "[['Tiny']], expected a list" in nested


def test_disabled_plugin_is_named_with_its_variable(
    catalog: Catalog, checkpoint: Path, tmp_path: Path
) -> None:
    selection = Selection.read({"TOKENSPEED_PLUGINS": "-tiny-plugin"})
    without = Catalog.discover(
        selection, distributions=distributions(path=[str(tmp_path / "site")])
    )
    for model in (str(checkpoint), "demo"):
        with pytest.raises(PluginError, match="TOKENSPEED_PLUGINS=-tiny-plugin"):
            resolve_checkpoint(Config(model=model), without)


def test_error_of_a_family_names_the_checkpoint(catalog: Catalog, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    assert refusal("demo", catalog) == f"{checkpoint}: config.json: vocab_size is missing"


def describe_any(config: Mapping[str, Any]) -> ModelInfo:
    OF_ANY.append(config.get("trust_remote_code"))
    return describe(config)


OF_ANY: list[object] = []  # the folder of trusted code in each call of `describe_any`
ANY = ModelSpec("*", f"{HERE}:describe_any", f"{HERE}:Tiny", runs_remote_code=True)


def test_family_for_any_architecture_is_the_last_choice(
    catalog: Catalog, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert "tokenspeed-models-transformers" in refusal(
        str(checkpoint), catalog, hf_overrides={"architectures": ["Unknown"]}
    )
    entries = tmp_path / "site" / "tiny_plugin-1.0.dist-info" / "entry_points.txt"
    entries.write_text(
        entries.read_text().replace(
            "[tokenspeed.models]", f"[tokenspeed.models]\n* = {HERE}:ANY [api1]"
        )
    )
    with_any = Catalog.discover(
        Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")])
    )
    found = resolve_checkpoint(Config(model=str(checkpoint)), with_any)
    assert found.spec == TINY
    with pytest.raises(ConfigError, match="--trust-remote-code has no effect"):
        resolve_checkpoint(Config(model=str(checkpoint), trust_remote_code=True), with_any)
    config["architectures"] = ["Unknown"]
    config["trust_remote_code"] = "/of/the/checkpoint"
    (checkpoint / "config.json").write_text(json.dumps(config))
    for trusts in (False, True):
        found = resolve_checkpoint(
            Config(model=str(checkpoint), trust_remote_code=trusts), with_any
        )
        assert found.spec == ANY
    assert [None, str(checkpoint)] == OF_ANY


def breaks(config: Mapping[str, Any]) -> ModelInfo:
    raise KeyError("num_layers")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_module:describe", "ModuleNotFoundError: No module"),
        (f"{HERE}:breaks", "KeyError: "),
    ],
)
def test_failing_family_names_its_plugin(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, target: str, why: str
) -> None:
    monkeypatch.setitem(globals(), "TINY", ModelSpec("TinyForCausalLM", target, f"{HERE}:Tiny"))
    with pytest.raises(PluginError) as caught:
        resolve_checkpoint(Config(), catalog)
    expected = f"models TinyForCausalLM of tiny-plugin 1.0 failed in {target}: {why}"
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_missing_demo_error_names_the_package(tmp_path: Path) -> None:
    empty = Catalog.discover(Selection.read({}), distributions=[])
    assert "tokenspeed-core[default]" in refusal("demo", empty)


def test_auto_prefers_safetensors(catalog: Catalog) -> None:
    both = ["model.bin", "model.safetensors"]
    assert choose_format(both, "auto", catalog, "tiny") is SAFE
    with pytest.raises(CheckpointError, match=r"^tiny: .*--load-format pt"):
        choose_format(both[:1], "auto", catalog, "tiny")
    assert choose_format([], "dummy", catalog, "tiny") is DUMMY
    with pytest.raises(CheckpointError, match=r"^tiny: .*dummy, pt, safetensors"):
        choose_format(["config.json"], "auto", catalog, "tiny")
    with pytest.raises(PluginError, match="did you mean safetensors"):
        choose_format(both, "safetensor", catalog, "tiny")


def test_one_copy_of_the_weights_is_downloaded(catalog: Catalog) -> None:
    side = ["config.json", "tokenizer.json", "chat_template.jinja"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    others = [
        "consolidated.safetensors",
        "model.bin",
        "model.bin.index.json",
        "original/params.json",
        "README.md",
    ]
    names = [*side, *shards, index, *others]
    assert wanted_files(names, "auto", catalog, "tiny") == [*side, index, *shards]
    assert wanted_files(names, "dummy", catalog, "tiny") == side
    assert wanted_files([*side, "model.safetensors", "model.bin"], "auto", catalog, "tiny") == [
        *side,
        "model.safetensors",
    ]


def test_tokenizer_source_is_downloaded_with_tiktoken_ranks_only(catalog: Catalog) -> None:
    code = ["modeling_tiny.py", "tokenization_tiny.py"]
    ranks = ["tiktoken.model", *code]
    assert wanted_files(ranks, "dummy", catalog, "tiny") == [
        "tiktoken.model",
        "tokenization_tiny.py",
    ]
    both = ["tokenizer.json", "tiktoken.model"]
    assert wanted_files([*both, *code], "dummy", catalog, "tiny") == both
    assert wanted_files(code, "dummy", catalog, "tiny") == []


def test_dry_run_refuses_unreadable_weights(
    catalog: Catalog,
) -> None:
    side = ["config.json", "tokenizer.json", "chat_template.jinja"]
    weights = [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors",
    ]
    assert wanted_files([*side, *weights], "auto", catalog, "tiny", with_weights=False) == side
    with pytest.raises(CheckpointError, match="--load-format pt"):
        wanted_files([*side, "model.bin"], "auto", catalog, "tiny", with_weights=False)
