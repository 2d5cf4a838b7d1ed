"""The FP8 KV cache: values, memory, scales and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_families import save_reference
from tokenspeed_testing.plans import PlanMaker
from torch import Tensor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import AttentionProblem, AttentionStep, FullAttention, KVScale
from tokenspeed_core.checkpoint.kv_scales import read_scale_file
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.attention import AttentionGroup, AttentionLayer, make_write_kv
from tokenspeed_core.worker.local import LocalRunner, plan_only
from tokenspeed_kernels.reference.cache import write_kv


def test_large_values_saturate_in_the_cache() -> None:
    problem = {
        "num_kv_heads": 1,
        "head_size": 4,
        "block_size": 2,
        "dtype": "bfloat16",
        "kv_dtype": "float8_e4m3fn",
    }
    caches = torch.zeros(2, 3, 2, 1, 4, dtype=torch.float8_e4m3fn)
    k = torch.tensor([[[1.0, -1000.0, 0.3, 1e30]]], dtype=torch.bfloat16)
    write_kv(problem)(k, -k, *caches, torch.tensor([3]))
    assert caches[0].float()[1, 1, 0].tolist() == [1.0, -448.0, 0.3125, 448.0]
    assert caches[1].float()[1, 1, 0].tolist() == [-1.0, 448.0, -0.3125, -448.0]
    assert caches.float().count_nonzero() == 8


def test_page_bytes_follow_the_cache_dtype(tiny: Callable[..., Resolved], catalog: Catalog) -> None:
    (plain, plain_memory, _), (fp8, fp8_memory, _) = (
        plan_only(tiny(dtype="bfloat16", block_size=16, kv_cache_dtype=kind), catalog)
        for kind in ("auto", "fp8_e4m3")
    )
    assert plain_memory["page_bytes"] == 2 * fp8_memory["page_bytes"]
    assert [dict(planned.problem)["kv_dtype"] for planned in fp8.find("write_kv")] == [
        "float8_e4m3fn"
    ]
    assert [dict(planned.problem)["kv_dtype"] for planned in plain.find("write_kv")] == ["bfloat16"]


class RecordingKernel:
    """An attention kernel that records its queries and returns the values."""

    def prepare(self, step: object) -> None:
        pass

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        self.queries = q.clone()
        out.copy_(v_cache)


def test_layer_scales_apply_to_keys_and_values() -> None:
    kernel, written = RecordingKernel(), []
    group = AttentionGroup(FullAttention("full", 1, 1, 4))
    group.batches = [("prefill", Mock(AttentionStep), None)]
    layer = AttentionLayer(group, 0, 0, AttentionProblem, None, kv_scale=KVScale(4.0, 2.0))
    layer.bind("prefill", kernel)
    layer.write_kv = make_write_kv(
        None, lambda k, v, *cache: written.extend((k, v)), layer.kv_scale
    )
    layer.caches = (torch.full((2, 1, 4), 3.0),) * 2
    q, k, v = torch.randn(3, 2, 1, 4)
    given = q.clone(), k.clone(), v.clone()
    out = layer(q, k, v)
    assert torch.equal(kernel.queries, 4 * given[0])
    assert torch.equal(written[0], k / 4)
    assert torch.equal(written[1], v / 2)
    assert torch.equal(out, torch.full((2, 1, 4), 6.0))
    assert torch.equal(k, given[1])
    assert torch.equal(v, given[2])


def scales_file(folder: Path, factors: object) -> str:
    path = folder / "scales.json"
    path.write_text(
        json.dumps(
            {"model_type": "x", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}
        )
    )
    return str(path)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_fp8_cache_hardly_changes_tokens(
    make_runner: Callable[..., LocalRunner], tmp_path: Path, is_scaled: bool
) -> None:
    scales = scales_file(tmp_path, {"0": {"0": 0.02, "1": 0.01}}) if is_scaled else None
    prompts = [[(7 * seed + 11 * i) % 90 + 3 for i in range(20 + seed)] for seed in range(8)]
    found = []
    for settings in ({}, {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": scales}):
        runner, plans = make_runner(**settings), PlanMaker(4)
        for slot, prompt in enumerate(prompts):
            plans.add(str(slot), prompt, slot)
        plans.step(runner, chunks={str(slot): len(prompt) for slot, prompt in enumerate(prompts)})
        found.append([plans.sequences[str(slot)].output for slot in range(len(prompts))])
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 6, f"{same} of 8 first tokens are the same"


def test_scales_are_read_per_layer(tmp_path: Path) -> None:
    scales = read_scale_file(scales_file(tmp_path, {"0": {"1": 0.5, "0": 0.25}}), 2)
    assert scales == (KVScale(0.25, 0.25), KVScale(0.5, 0.5))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"0": {"0": 1.0}}, "KeyError"),
        ([1.0, 1.0], "TypeError"),
        ({"0": {"0": 1.0, "1": "much"}}, "could not convert string to float"),
        ({"0": {"0": 1.0, "1": 0.0}}, "positive and finite"),
    ],
)
def test_scale_file_must_cover_every_layer(tmp_path: Path, factors: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scales.json.*{message}"):
        read_scale_file(scales_file(tmp_path, factors), 2)


def test_missing_scale_file_is_refused() -> None:
    config = Config.from_keywords(
        kv_cache_dtype="fp8_e4m3", quantization_param_path="/nowhere.json"
    )
    with pytest.raises(ConfigError, match=r"/nowhere.json: No such file or directory$"):
        resolve(config, discover(config))


def test_scales_need_an_fp8_cache() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3"):
        Config.from_keywords(quantization_param_path="scales.json")
    with pytest.raises(ConfigError, match="auto, fp8_e4m3"):
        Config.from_keywords(kv_cache_dtype="fp4")
    assert Config.from_keywords(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"


LARGE = 10000.0  # of values; e4m3 ends at 448


def checkpoint_with_scales(folder: Path, scales: dict[str, Tensor]) -> Any:
    """Write a tiny checkpoint with large values, with or without scales, and return its transformers model."""
    reference = save_reference("Qwen3", folder, num_hidden_layers=2, initializer_range=0.08)
    for layer in reference.model.layers:
        layer.self_attn.v_proj.weight.data *= LARGE
        layer.self_attn.o_proj.weight.data /= LARGE
    tensors = {name: each.contiguous() for name, each in reference.state_dict().items()}
    save_file({**tensors, **scales}, folder / "model.safetensors")
    return reference


def named(form: str) -> dict[str, Tensor]:
    """Return scales under the names of a writer."""
    found: dict[str, Tensor] = {}
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        k, v = torch.tensor(0.125 * (layer + 1)), torch.tensor([LARGE / 64])
        found |= {
            "llm-compressor": {f"{attention}.k_scale": k[None], f"{attention}.v_scale": v},
            "ModelOpt": {f"{attention}.k_proj.k_scale": k, f"{attention}.v_proj.v_scale": v},
            "Quark": {
                f"{attention}.k_proj.output_scale": k.bfloat16(),
                f"{attention}.v_proj.output_scale": v.half(),
            },
        }[form]
    return found


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_total_tokens": 128,
    "kv_cache_dtype": "fp8_e4m3",
}
PROMPT = [(7 * index) % 90 + 3 for index in range(20)]


def first_error(folder: Path, reference: Any, **settings: Any) -> float:
    """Return the largest error of the first token's log-probabilities."""
    with LLM(str(folder), **{**OPTIONS, **settings}) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        answer = llm.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1:].log_softmax(dim=-1)
    assert answer.logprobs is not None
    return max(
        abs(found.logprob - float(expected[0, token]))
        for token, found in answer.logprobs[0].items()
    )


@pytest.mark.parametrize("form", ["llm-compressor", "ModelOpt", "Quark"])
def test_scales_of_the_checkpoint_are_used(form: str, tmp_path: Path) -> None:
    reference = checkpoint_with_scales(tmp_path, named(form))
    config = Config.from_keywords(model=str(tmp_path), **OPTIONS)
    scales = resolve(config, discover(config)).kv_scales
    value = float(torch.tensor(LARGE / 64).half())
    assert [each.key for each in scales] == [0.125, 0.25]
    assert [each.value for each in scales] == pytest.approx([value] * 2, rel=1e-3)
    if form == "llm-compressor":
        assert first_error(tmp_path, reference) < 0.2
        assert first_error(tmp_path, reference, kv_cache_dtype="auto") < 1e-3
        path = scales_file(tmp_path, {"0": {"0": 1.0, "1": 1.0}})
        assert first_error(tmp_path, reference, quantization_param_path=path) > 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.self_attn.v_scale": None}, "layer 1 has only one scale.*v_scale is missing"),
        ({"1.self_attn.v_scale": None, "1.self_attn.k_scale": None}, "of layer 1 are missing"),
        ({"0.self_attn.k_scale": torch.zeros(1)}, "of layer 0 are KVScale"),
        ({"0.self_attn.k_scale": torch.ones(2)}, r"0.self_attn.k_scale is F32 of shape \[2\]"),
    ],
    ids=["one", "layer", "zero", "heads"],
)
def test_wrong_scales_of_a_checkpoint_are_named(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    scales = named("llm-compressor")
    for name, tensor in change.items():
        scales.pop(f"model.layers.{name}")
        if tensor is not None:
            scales[f"model.layers.{name}"] = tensor
    checkpoint_with_scales(tmp_path, scales)
    config = Config.from_keywords(model=str(tmp_path), **OPTIONS)
    with pytest.raises(CheckpointError, match=message):
        resolve(config, discover(config))
