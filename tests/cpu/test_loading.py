"""Weight loading: tensors are copied exactly, and an error names everything that does not fit."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenspeed_core.api import WeightReader
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import _load_weights as load_weights
from tokenspeed_models.families.llama import LlamaForCausalLM
from tokenspeed_models.families.qwen3_moe import Qwen3MoeForCausalLM
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.loading.pt import read_pt
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightMap, WeightSlot

LLAMA: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
Weights = dict[str, torch.Tensor]


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM({**LLAMA, **changes}, DenseBuild())


def random_weights(model: LlamaForCausalLM | Qwen3MoeForCausalLM) -> Weights:
    """Return random tensors for all slots of a model's weight map."""
    generator = torch.Generator().manual_seed(1)
    return {
        slot.name: torch.randn(slot.target.shape, generator=generator)
        for slot in model.weight_map()
    }


def quiet(done: int, total: int) -> None:
    """Ignore the progress."""


def loaded(model: LlamaForCausalLM | Qwen3MoeForCausalLM) -> Weights:
    return {slot.name: slot.target.clone() for slot in model.weight_map()}


def assert_same(first: Weights, second: Weights) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def load_error(model: LlamaForCausalLM | Qwen3MoeForCausalLM, weights: Weights) -> str:
    with pytest.raises(ValueError, match="do not match its") as caught:
        model.load_weights(weights.items())
    assert "\n" not in str(caught.value)
    return str(caught.value).partition("config.json: ")[2]


def test_weights_fill_their_part_of_a_parameter() -> None:
    model = llama(attention_bias=True, mlp_bias=True)
    weights = random_weights(model)
    model.load_weights(weights.items())
    assert_same(loaded(model), weights)
    qkv = torch.cat([weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(model.layers[1].attention.qkv.weight, qkv)


def test_error_names_every_weight_that_does_not_fit() -> None:
    weights = random_weights(llama())
    del weights["model.layers.0.mlp.up_proj.weight"], weights["model.norm.weight"]
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
    weights["lm_head.weight"] = torch.zeros(16, 31)
    weights["model.embed_tokens.weight"] = torch.zeros(31, 16, dtype=torch.int8)
    message = load_error(llama(), weights)
    assert "missing: model.norm.weight, model.layers.0.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.2.mlp.up_proj.weight" in message
    assert "lm_head.weight has shape [16, 31], expected [31, 16]" in message
    assert "model.embed_tokens.weight is torch.int8, expected an unquantized weight" in message


def test_many_missing_weights_are_grouped() -> None:
    model = Qwen3MoeForCausalLM(MOE, DenseBuild())
    weights = {
        name: tensor for name, tensor in random_weights(model).items() if "experts" not in name
    }
    message = load_error(model, weights)
    assert "model.layers.*.mlp.experts.*.gate_proj.weight (12 of them)" in message
    assert len(message) < 400


def test_repeated_weight_is_refused() -> None:
    model = llama()
    weights = [*random_weights(model).items(), ("model.norm.weight", torch.ones(16))]
    with pytest.raises(ValueError, match=r"given twice: model\.norm\.weight"):
        model.load_weights(weights)


def test_rotary_tables_and_tied_heads_are_ignored() -> None:
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    model = llama(tie_word_embeddings=True)
    weights = random_weights(model)
    assert "lm_head.weight" not in weights
    model.load_weights({**weights, **table, "lm_head.weight": torch.zeros(31, 16)}.items())
    assert torch.equal(model.head.weight, weights["model.embed_tokens.weight"])
    assert "unexpected: other_inv_freq" in load_error(
        model, {**weights, "other_inv_freq": torch.zeros(1)}
    )


def test_module_names_and_published_names_both_load() -> None:
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.moe.router.weight"):
        target = torch.zeros(3)
        slot = WeightSlot("model.layers.0.mlp.gate.weight", target, None)
        renames = {".mlp.": ".moe.", ".gate.": ".router."}
        WeightMap([slot], renames=renames).load([(name, torch.ones(3))])
        assert target.eq(1).all()
        with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.moe\.router\.weight"):
            WeightMap([slot], renames=renames).load([])


def test_layers_below_an_ignored_name_are_not_read() -> None:
    weights = WeightMap([], ["model.layers.1."])
    weights.load([("model.layers.1.mlp.gate.weight", torch.ones(3))])
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.10\.norm\.weight"):
        weights.load([("model.layers.10.norm.weight", torch.ones(3))])


def test_stacked_experts_load_like_single_experts() -> None:
    single, stacked = Qwen3MoeForCausalLM(MOE, DenseBuild()), Qwen3MoeForCausalLM(MOE, DenseBuild())
    weights = random_weights(single)
    fused = {name: tensor for name, tensor in weights.items() if "experts" not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        fused[f"{at}.gate_up_proj"] = torch.stack(
            [
                torch.cat(
                    [weights[f"{at}.{e}.gate_proj.weight"], weights[f"{at}.{e}.up_proj.weight"]]
                )
                for e in range(6)
            ]
        )
        fused[f"{at}.down_proj"] = torch.stack(
            [weights[f"{at}.{e}.down_proj.weight"] for e in range(6)]
        )
    single.load_weights(weights.items())
    stacked.load_weights(fused.items())
    assert_same(loaded(single), loaded(stacked))
    both = {**fused, "model.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(12, 16)}
    assert "given twice: model.layers.0.mlp.experts.3.up_proj.weight" in load_error(stacked, both)


def write_shards(folder: Path, weights: Weights, num_shards: int, *, indexed: bool) -> list[Path]:
    names = list(weights)
    files, index = [], {}
    for shard in range(num_shards):
        files.append(folder / f"model-{shard + 1:05}-of-{num_shards:05}.safetensors")
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, files[-1])
        index.update(dict.fromkeys(part, files[-1].name))
    if indexed:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return files


@pytest.mark.parametrize("indexed", [True, False])
def test_all_shards_are_read_and_progress_reaches_the_total(tmp_path: Path, indexed: bool) -> None:
    model = llama()
    weights = random_weights(model)
    write_shards(tmp_path, weights, 3, indexed=indexed)
    if indexed:  # a copy that is not in the index
        save_file(weights, tmp_path / "consolidated.safetensors")
    seen: list[tuple[int, int]] = []
    model.load_weights(
        read_safetensors(str(tmp_path), model, lambda *progress: seen.append(progress))
    )
    assert_same(loaded(model), weights)
    done = [at for at, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


@pytest.mark.parametrize("indexed", [True, False])
def test_missing_shard_is_named(tmp_path: Path, indexed: bool) -> None:
    files = write_shards(tmp_path, random_weights(llama()), 3, indexed=indexed)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors"):
        next(iter(read_safetensors(str(tmp_path), llama(), quiet)))


def test_error_names_the_folder_once(tmp_path: Path, catalog: Catalog) -> None:
    model: Any = SimpleNamespace(load_weights=list)

    def load() -> str:
        with pytest.raises(CheckpointError) as refused:
            load_weights(model, tmp_path, "safetensors", catalog, lambda what, done, total: None)
        assert str(refused.value).count(str(tmp_path)) == 1
        return str(refused.value)

    (tmp_path / "model.safetensors").symlink_to("missing")
    assert "broken link" in load()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00001-of-00002.safetensors" in load()
    model.load_weights = Mock(side_effect=ValueError("missing: lm_head.weight"))
    assert "missing: lm_head.weight" in load()


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    weights = random_weights(llama())
    save_file(weights, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        dict(read_safetensors(str(tmp_path), llama(), quiet))


def test_truncated_shard_is_named_before_any_is_read(tmp_path: Path) -> None:
    files = write_shards(tmp_path, random_weights(llama()), 3, indexed=True)
    files[2].write_bytes(files[2].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors cannot be read"):
        next(iter(read_safetensors(str(tmp_path), llama(), quiet)))


@pytest.mark.parametrize("reader", [read_safetensors, read_pt])
def test_directory_without_weights_is_refused(tmp_path: Path, reader: WeightReader) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors|pytorch_model\.bin"):
        list(reader(str(tmp_path), llama(), quiet))


def test_several_weight_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"a\.safetensors, b\.safetensors"):
        list(read_safetensors(str(tmp_path), llama(), quiet))


def test_invalid_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weights": {}}')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        list(read_safetensors(str(tmp_path), llama(), quiet))


@pytest.mark.parametrize("as_zip", [True, False])
def test_pt_files_load_the_same_model(tmp_path: Path, as_zip: bool) -> None:
    model = llama()
    weights = random_weights(model)
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    model.load_weights(read_pt(str(tmp_path), model, quiet))
    assert_same(loaded(model), weights)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("as_zip", [True, False])
def test_code_in_a_pt_file_does_not_run(tmp_path: Path, as_zip: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    if as_zip:
        torch.save({"x": Payload(tmp_path / "owned")}, file)
    else:
        file.write_bytes(pickle.dumps({"x": Payload(tmp_path / "owned")}, protocol=2))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        list(read_pt(str(tmp_path), llama(), quiet))
    assert not (tmp_path / "owned").exists()


def test_pt_file_with_nested_content_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {"x": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        list(read_pt(str(tmp_path), llama(), quiet))


def test_dummy_weights_are_repeatable_and_give_finite_logits() -> None:
    models = [Qwen3MoeForCausalLM(MOE, DenseBuild()) for _ in range(2)]
    for model in models:
        model.load_weights(read_dummy("/nonexistent", model, quiet))
    assert_same(loaded(models[0]), loaded(models[1]))
    build = DenseBuild()
    model = Qwen3MoeForCausalLM(MOE, build)
    model.load_weights(read_dummy("", model, quiet))
    logits = sequence_logits(model, build, [1, 2, 3, 4])
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_weights_are_converted_to_the_models_dtype(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LLAMA, DenseBuild(dtype=torch.bfloat16))
    weights = random_weights(llama())
    save_file(weights, tmp_path / "model.safetensors")
    model.load_weights(read_safetensors(str(tmp_path), model, quiet))
    assert_same(
        loaded(model),
        {
            name: tensor.bfloat16()
            for name, tensor in load_file(tmp_path / "model.safetensors").items()
        },
    )


MEASURE = """
import sys, torch
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.loading.pt import read_pt
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024
reader = {"safetensors": read_safetensors, "pt": read_pt}[sys.argv[2]]
for _ in range(2):  # the first pass includes lazy imports
    before, most = anonymous(), 0
    for name, tensor in reader(sys.argv[1], None, lambda done, total: None):
        copy = tensor.clone()
        most = max(most, anonymous() - before)
        del copy, tensor
print(most)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", pytest.param("pt", marks=pytest.mark.release)])
def test_reading_holds_about_one_tensor_in_memory(tmp_path: Path, kind: str) -> None:
    weights = {f"w{index}": torch.zeros(4 << 20) for index in range(8)}  # 16 MiB each
    if kind == "pt":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        save_file(weights, tmp_path / "model.safetensors")
    # Otherwise glibc may keep freed memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), kind],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
    )
    assert int(out.stdout) < 48 << 20
