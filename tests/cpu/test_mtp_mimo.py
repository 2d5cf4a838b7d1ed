"""MiMo-7B and its layer for multi-token prediction, against the layers of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import draft_in_every_step
from quantized_build import TOKENS, load, transformers_logits
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_models_mimo import MIMO
from tokenspeed_models_mimo.describe import describe_mimo
from tokenspeed_models_mimo.model import MiMoForCausalLM, MiMoMTP
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import FullAttention
from tokenspeed_models.testing import DenseBuild

NAME = "model.mtp_layers.0"
MIMO_7B: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151680,
}


def save_mimo(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Write a checkpoint in the published layout, and return its transformers model and the draft layer's weights."""
    reference = save_reference("Qwen2", folder, use_sliding_window=False)
    config = json.loads((folder / "config.json").read_text())
    names = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(
        json.dumps({**config, **names, "num_nextn_predict_layers": 1})
    )
    hidden = reference.config.hidden_size
    layer = Qwen2DecoderLayer(reference.config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    draft = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    draft["input_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        draft[f"{norm}.weight"] = torch.rand(hidden) + 0.5
    weights = load_file(folder / "model.safetensors")
    weights |= {f"{NAME}.{name}": tensor for name, tensor in draft.items()}
    save_file(weights, folder / "model.safetensors")
    return reference, draft


def reference_logits(reference: Any, draft: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """Return the logits of the layer for all tokens but the last, computed by modules of transformers."""
    config = reference.config
    layer = Qwen2DecoderLayer(config, 0)
    layer.load_state_dict({name: draft[name] for name in layer.state_dict()})

    def norm(name: str, x: Tensor) -> Tensor:
        module = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
        module.load_state_dict({"weight": draft[f"{name}.weight"]})
        found: Tensor = module(x)
        return found

    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        hidden = reference.model(tokens).last_hidden_state[:, :-1]
        embedded = reference.model.embed_tokens(tokens[:, 1:])
        inputs = (norm("hidden_layernorm", hidden), norm("token_layernorm", embedded))
        x = torch.cat(inputs, dim=-1) @ draft["input_proj.weight"].T
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        rotation = reference.model.rotary_emb(x, positions)
        x = layer.eval()(
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotation
        )
        logits: Tensor = reference.lm_head(norm("final_layernorm", x))[0]
    return logits


def test_published_configuration_is_described() -> None:
    info = describe_mimo(MIMO_7B)
    assert (info.architecture, info.num_parameters) == ("MiMoForCausalLM", 7_622_619_136)
    assert info.cache_groups == (FullAttention("full", 36, 8, 128),)
    assert (info.max_model_len, info.dtype, info.eos_token_ids) == (32768, "bfloat16", (151645,))


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", False), ("hidden_act", "gelu"), ("rope_scaling", {"type": "own"})],
)
def test_unsupported_value_is_named_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        describe_mimo({**MIMO_7B, key: value})


def test_model_and_drafts_equal_the_layers_of_transformers(tmp_path: Path) -> None:
    reference, draft = save_mimo(tmp_path)
    build = DenseBuild()
    target = load(MIMO, tmp_path, build)
    assert isinstance(target, MiMoForCausalLM)
    info = MIMO.plan_mtp(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    assert info.load.endswith(f":{MiMoMTP.__name__}")
    assert info.num_parameters == sum(tensor.numel() for tensor in draft.values())
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS) - 1)
    with torch.inference_mode():
        hidden = target.forward(tokens[:-1], positions)
        logits = target.logits(hidden)
        build.clear()
        model = MiMoMTP(info.config, build, target)
        model.load_weights(load_file(tmp_path / "model.safetensors").items())
        found = model.logits(model.forward(tokens[1:], positions, hidden, None))
    torch.testing.assert_close(
        logits, transformers_logits(reference, TOKENS[:-1]), atol=1e-4, rtol=1e-4
    )
    expected = reference_logits(reference, draft, TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "processes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.release)]
)
def test_draft_layer_changes_no_token(
    processes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_in_every_step(monkeypatch)
    reference, _ = save_mimo(tmp_path)
    prompts = [TOKENS[:length] for length in (5, 17, 23)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, **processes}
    for settings in ({}, drafting):
        with LLM(
            str(tmp_path),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            **settings,  # type: ignore[arg-type]
        ) as llm:
            wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(wanted, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            num_drafted = llm.stats().num_draft_rows
    assert answers[0] == answers[1]
    assert num_drafted > 0
    for prompt, tokens in zip(prompts, answers[0], strict=True):
        logits = transformers_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max() < 1e-4
