"""EAGLE-3 heads against transformers' Llama layers, in the published layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import save_reference
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from tokenspeed_core.api import DraftCheckpoint, DraftModelInfo, DraftRequest
from tokenspeed_models.describe import describe_qwen3
from tokenspeed_models.descriptors import QWEN3
from tokenspeed_models.drafters.eagle3 import Eagle3Head
from tokenspeed_models.drafters.eagle3_config import ARCHITECTURES, check, plan, read_eagle3
from tokenspeed_models.families.qwen3 import Qwen3ForCausalLM
from tokenspeed_models.layers import CausalLM
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild

Json = dict[str, Any]
HIDDEN, VOCAB, DRAFT_VOCAB, NUM_LAYERS = 64, 96, 40, 4

# Keys of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, in small.
PUBLISHED: Json = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "pad_token_id": 0,
    "pretraining_tp": 1,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("target")
    model = save_reference(
        "Qwen3",
        folder,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=NUM_LAYERS,
    )
    return model, folder


@pytest.fixture(scope="module")
def target(reference: tuple[Any, Path]) -> CausalLM:
    model, folder = reference
    built = Qwen3ForCausalLM(model.config.to_dict(), DenseBuild())
    built.load_weights(read_safetensors(str(folder), built, lambda done, total: None))
    return built


class Reference(nn.Module):
    """The published architecture in float32: attention, MLP, norms and rotation are transformers'."""

    def __init__(self, config: Json, num_captured: int = 3) -> None:
        super().__init__()
        c = self.config = transformers.LlamaConfig(**config, attn_implementation="eager")
        self.num_captured = num_captured
        self.norm_first = bool(config.get("norm_before_residual"))
        self.fc = nn.Linear(num_captured * HIDDEN, HIDDEN, bias=False)
        self.midlayer = llama.LlamaDecoderLayer(c, 0)
        self.midlayer.hidden_norm = llama.LlamaRMSNorm(HIDDEN, c.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.midlayer.self_attn, name).out_features
            wider = nn.Linear(2 * HIDDEN, size, bias=c.attention_bias)
            setattr(self.midlayer.self_attn, name, wider)
        self.norm = llama.LlamaRMSNorm(HIDDEN, c.rms_norm_eps)
        self.lm_head = nn.Linear(HIDDEN, c.draft_vocab_size, bias=False)
        self.rotary = llama.LlamaRotaryEmbedding(c)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.1, 0.2, generator=generator)
        ids = torch.randperm(VOCAB, generator=generator)[: c.draft_vocab_size].sort().values
        self.token_ids = ids

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights as published."""
        ids = self.token_ids
        return {
            **self.state_dict(),
            "d2t": ids - torch.arange(len(ids)),
            "t2d": torch.isin(torch.arange(VOCAB), ids),
        }

    @torch.no_grad()
    def draft(self, captured: Tensor, embeds: Tensor) -> Tensor:
        """Return logits [n, vocab] after T captured states, and after own states, for embeds [T + n - 1, hidden]."""
        layer, x, rows = self.midlayer, self.fc(captured)[None], []
        while True:
            num = x.shape[1]
            normed = layer.hidden_norm(x)
            both = torch.cat((layer.input_layernorm(embeds[None, :num]), normed), dim=-1)
            mask = torch.full((1, 1, num, num), -torch.inf).triu(1)
            positions = self.rotary(x, torch.arange(num)[None])
            out = layer.self_attn(both, positions, mask)[0] + (normed if self.norm_first else x)
            out = out + layer.mlp(layer.post_attention_layernorm(out))
            logits = torch.full((VOCAB,), -torch.inf)
            logits[self.token_ids] = self.lm_head(self.norm(out[0, -1]))
            rows.append(logits)
            if num == len(embeds):
                return torch.stack(rows)
            x = torch.cat((x, out[:, -1:]), dim=1)


def make_head(
    config: Json, weights: dict[str, Tensor], target: CausalLM, **changes: Any
) -> tuple[Eagle3Head, DenseBuild]:
    c = read_eagle3(config, num_target_layers=NUM_LAYERS, max_model_len=64, **changes)
    build = DenseBuild()
    head = Eagle3Head({"eagle3": c}, build, target)
    head.load_weights(iter(weights.items()))
    return head, build


def run(head: Eagle3Head, captured: Tensor, tokens: list[int], num_chunks: int = 1) -> Tensor:
    """Return the rows of `Reference.draft`, computed in chunks and then for single tokens, as in the engine."""
    num, ids = len(captured), torch.tensor(tokens)
    rows, last = [], torch.tensor([0])
    for part in torch.arange(num).chunk(num_chunks):
        hidden = head.begin(captured[part])
        last = torch.tensor([len(part) - 1])
        hidden = head.forward(ids[part], part, hidden, last)
    rows.append(head.logits(hidden))
    for place in range(num, len(tokens)):
        hidden = head.forward(ids[place, None], torch.tensor([place]), hidden, None)
        rows.append(head.logits(hidden))
    return torch.cat(rows)


def drafted(reference: Reference, head: Eagle3Head, target: CausalLM) -> tuple[Tensor, Tensor]:
    """Return the logits of a head and of the reference, of four draft tokens after six states."""
    generator = torch.Generator().manual_seed(7)
    captured = torch.randn(6, reference.num_captured * HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (9,), generator=generator).tolist()
    expected = reference.draft(captured, target.embed(torch.tensor(tokens)))
    return run(head, captured, tokens, num_chunks=2), expected


def renamed(weights: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("layer", "changes"),
    [
        ("midlayer.", {}),
        ("layers.0.", {}),
        ("model.layers.0.", {}),
        ("midlayer.", {"tie_word_embeddings": True}),  # SpecForge's qwen3-4b-eagle3.json
    ],
)
def test_drafts_equal_transformers(target: CausalLM, layer: str, changes: Json) -> None:
    reference = Reference(PUBLISHED)
    weights = renamed(reference.checkpoint(), "midlayer.", layer)
    head, _ = make_head({**PUBLISHED, **changes}, weights, target)
    ours, expected = drafted(reference, head, target)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (ours.isfinite().sum(dim=1) == DRAFT_VOCAB).all()


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_speculators_layout_equals_transformers(target: CausalLM, architecture: str) -> None:
    changes: Json = {"norm_before_residual": True, "attention_bias": True}
    reference = Reference({**PUBLISHED, **changes})
    own = ("architectures", "draft_vocab_size")
    nested = {key: value for key, value in PUBLISHED.items() if key not in own}
    config = {
        "architectures": [architecture],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": {**nested, "attention_bias": True},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    weights = renamed(reference.checkpoint(), "midlayer.", "layers.0.")
    weights["embed_tokens.weight"] = target.embedding.weight.to(torch.float64)
    head, _ = make_head(config, weights, target)
    ours, expected = drafted(reference, head, target)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_head_with_all_tokens_and_two_layers_equals_transformers(target: CausalLM) -> None:
    config = {key: value for key, value in PUBLISHED.items() if key != "draft_vocab_size"}
    reference = Reference({**config, "draft_vocab_size": VOCAB}, num_captured=2)
    weights = reference.checkpoint()
    assert not weights["d2t"].any()
    head, _ = make_head(config, weights, target, layers=[0, 2])
    ours, expected = drafted(reference, head, target)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_captured_states_are_those_of_transformers(
    reference: tuple[Any, Path], target: CausalLM
) -> None:
    ids = torch.randint(0, VOCAB, (7,), generator=torch.Generator().manual_seed(3))
    layers = (1, 2, 3)
    with torch.no_grad():
        states = reference[0](ids[None], output_hidden_states=True).hidden_states
    hidden, captured = target.forward_and_capture(ids, torch.arange(7), layers)
    expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "num_layers", "expected"),
    [
        ({}, 32, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, 94, (2, 47, 91)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, 36, (2, 18, 33)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 47, 91]}, 94, (2, 47, 91)),  # of speculators
    ],
)
def test_layers_are_counted_by_their_input(
    changes: Json, num_layers: int, expected: tuple[int, ...]
) -> None:
    c = read_eagle3({**PUBLISHED, **changes}, num_target_layers=num_layers, max_model_len=4096)
    assert c.layers == expected
    assert c.decoder.rope.max_positions == 4096, "positions beyond those of the head's training"


def request(folder: Path, target: Json, head: Json, **options: Any) -> DraftRequest:
    return DraftRequest(
        DraftCheckpoint(folder, target, QWEN3, describe_qwen3(target)),
        DraftCheckpoint(folder / "head", head, None, None),
        options,
    )


@pytest.fixture(scope="module")
def target_config(reference: tuple[Any, Path]) -> Json:
    config: Json = reference[0].config.to_dict()
    return config


def test_plan_counts_parameters(tmp_path: Path, target_config: Json) -> None:
    info: DraftModelInfo = plan(request(tmp_path, target_config, PUBLISHED))
    reference = Reference(PUBLISHED)
    assert info.num_parameters == sum(each.numel() for each in reference.parameters())
    assert info.weights == tmp_path / "head"
    assert info.layers == (2, 2, 1)


WRONG_CONFIGS: tuple[tuple[Json, str], ...] = (
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ({"architectures": [["LlamaForCausalLMEagle3"]]}, "architectures"),
    ({"hidden_size": 32}, "hidden size 32"),
    ({"target_hidden_size": 128}, "target_hidden_size"),
    ({"vocab_size": 128}, "vocabulary of 128"),
    ({"draft_vocab_size": 500}, "draft_vocab_size"),
    ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ({"fc_norm": True}, "fc_norm"),
    ({"tie_word_embeddings": True, "draft_vocab_size": VOCAB}, "tie_word_embeddings"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ({"eagle_config": 3}, "eagle_config is 3"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "layers 1, 2, 3"),
    ({"transformer_layer_config": {}}, "norm_before_residual"),
)


@pytest.mark.parametrize(("changes", "named"), WRONG_CONFIGS)
def test_unsupported_heads_are_refused_in_one_line(
    tmp_path: Path, target_config: Json, changes: Json, named: str
) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        plan(request(tmp_path, target_config, {**PUBLISHED, **changes}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [[3], [-1], "1,2", [], [True], [1.0]])
def test_wrong_layers_are_refused(tmp_path: Path, target_config: Json, layers: Any) -> None:
    def use() -> None:
        check({"layers_to_capture": layers})
        plan(request(tmp_path, target_config, PUBLISHED, layers_to_capture=layers))

    with pytest.raises(ValueError, match="layers"):
        use()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps"):
        check({"num_steps": 3})


def wrong_weights(weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield a name that the error must contain, and weights that must be refused."""
    yield "fc.weight", {**weights, "fc.weight": weights["fc.weight"][:, :HIDDEN]}
    yield "d2t", {name: tensor for name, tensor in weights.items() if name != "d2t"}
    yield "d2t", {**weights, "d2t": weights["d2t"] + VOCAB}
    yield "d2t", {**weights, "d2t": -torch.arange(DRAFT_VOCAB)}
    yield "d2t", {**weights, "d2t": weights["d2t"].float()}
    yield "embed_tokens", {**weights, "embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}
    yield "midlayer2", {**weights, "midlayer2.weight": torch.ones(1)}


def test_wrong_weights_are_refused(target: CausalLM) -> None:
    for named, weights in wrong_weights(Reference(PUBLISHED).checkpoint()):
        with pytest.raises(ValueError, match=named):
            make_head(PUBLISHED, weights, target)


def test_head_of_another_width_is_refused_when_built(target: CausalLM) -> None:
    c = read_eagle3(PUBLISHED, num_target_layers=NUM_LAYERS, max_model_len=64)
    narrow = replace(c, decoder=replace(c.decoder, hidden_size=32))
    with pytest.raises(ValueError, match="hidden size 32"):
        Eagle3Head({"eagle3": narrow}, DenseBuild(), target)


def test_known_architectures() -> None:
    for architecture in ARCHITECTURES:
        config = {**PUBLISHED, "architectures": [architecture]}
        read_eagle3(config, num_target_layers=NUM_LAYERS, max_model_len=64)
