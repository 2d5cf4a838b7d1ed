"""Greedy tokens equal those of transformers, with chunks, prefix hits and requests of many lengths at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, MORE, NATIVE, save_reference
from tokenspeed_models_transformers.model import TransformersModel

from tokenspeed_core import LLM, SamplingParams, TokenSpeedError
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import plan_only

pytestmark = pytest.mark.slow
pytest.importorskip("tokenspeed_kernels")

LENGTHS = (1, 6, 17, 33)
NUM_TOKENS = 6
NEAR = 1e-4  # logits this close are equal: either token is right
# The family for any architecture, although another one supports the model.
ANY = {"hf_overrides": {"architectures": ["*"]}}


def prompts() -> list[list[int]]:
    """Return prompts of several lengths; each is the beginning of the longest."""
    longest = np.random.default_rng(3).integers(3, 101, max(LENGTHS)).tolist()
    return [longest[:length] for length in LENGTHS]


def check(model_type: str, folder: Path, **settings: Any) -> None:
    """Compare the tokens of a tiny checkpoint, the second time with prefix hits. `near` is the tolerance of logits."""
    near = settings.pop("near", NEAR)
    reference = save_reference(model_type, folder, **settings.pop("changes", {}))
    if settings.pop("is_decoder_alone", False):
        weights = load_file(folder / "model.safetensors")
        short = {name.removeprefix("model."): weight for name, weight in weights.items()}
        save_file(short, folder / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    defaults: dict[str, Any] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_total_tokens": 512,
        "max_num_seqs": 4,
        "chunked_prefill_size": 12,
        "block_size": 4,
    }
    with LLM(str(folder), **{**defaults, **settings}) as llm:
        runner: Any = llm._engine.runner
        assert type(getattr(runner, "_runner", runner)._model) is TransformersModel
        for is_cached in (False, True):
            outputs = llm.generate([{"prompt_token_ids": each} for each in prompts()], params)
            assert outputs[-1].num_cached_tokens == 32 or not is_cached
            for prompt, output in zip(prompts(), outputs, strict=True):
                tokens = output.outputs[0].token_ids
                assert len(tokens) == NUM_TOKENS
                with torch.inference_mode():
                    logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0]
                for at, token in enumerate(tokens, len(prompt) - 1):
                    assert logits[at].max() - logits[at, token] <= near, f"position {at}"


@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("model_type", MORE)
def test_greedy_tokens_of_more_models_equal_transformers(model_type: str, tmp_path: Path) -> None:
    # transformers gives the checkpoints of some types an architecture that another family supports.
    check(model_type, tmp_path, **ANY)


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in ("qwen3", "qwen3_moe") else pytest.param(name, marks=pytest.mark.release)
        for name in NATIVE
    ],
)
def test_native_models_can_run_through_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path, **ANY)


EP: dict[str, Any] = {"enable_expert_parallel": True}
ONE_KV_HEAD = {"num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("model_type", "num_processes", "settings"),
    [
        # A shared expert, norms of heads, and more processes than KV heads.
        ("dots1", 2, {**EP, "changes": ONE_KV_HEAD}),
        pytest.param("qwen3", 4, ANY, marks=pytest.mark.release),
        *(
            pytest.param(name, 2, settings, marks=pytest.mark.release)
            for name, settings in (
                ("smollm3", {}),
                ("qwen3_moe", ANY),
                # Norms over all heads: attention is not divided.
                ("olmoe", {"attn_tp_size": 1, "moe_tp_size": 2}),
                ("ernie4_5", {}),
                ("glm", {}),
                ("helium", {}),
                ("seed_oss", {}),
                ("granite", {}),
                ("qwen3_moe", {**ANY, **EP}),
                ("dots1", {**EP, "is_decoder_alone": True}),  # names without a prefix
                ("stablelm", {}),
                ("mixtral", ANY),
                ("qwen2_moe", {}),  # a gate of the shared expert
                ("sarvam_moe", ANY),  # stacked projections in the checkpoint
                ("qwen3", {**ANY, "quantization": "w8a8_int8", "near": 0.1}),
            )
        ),
    ],
)
def test_several_processes_give_the_tokens_of_transformers(
    model_type: str, num_processes: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {} if "attn_tp_size" in settings else {"tensor_parallel_size": num_processes}
    check(model_type, tmp_path, **sizes, **settings)


@pytest.mark.parametrize(
    ("model_type", "settings", "named"),
    [
        ("gpt_neox", {"tensor_parallel_size": 2}, "--attn-tp-size 1"),
        ("gpt_neox", {"attn_tp_size": 1, "dense_tp_size": 2}, "one process"),
        ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}, "engines"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    model_type: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_reference(model_type, tmp_path)
    catalog = Catalog.discover()
    with pytest.raises(TokenSpeedError, match=named) as refused:
        plan_only(
            resolve(Config.from_keywords(model=str(tmp_path), **ANY, **settings), catalog), catalog
        )
    assert "\n" not in str(refused.value)
