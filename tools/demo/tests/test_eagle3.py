"""The draft head's training: its unrolled steps, its loss, and the count of accepted drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenspeed_demo import CHECKPOINT

torch = pytest.importorskip("torch", reason="training needs torch")
np = pytest.importorskip("numpy", reason="training needs numpy")

from demo_training.data import BatchMaker, Encoder, Shape, batches  # noqa: E402
from demo_training.distillation import Acceptance, train  # noqa: E402
from demo_training.eagle3 import Eagle3, Eagle3Config, target_config  # noqa: E402
from demo_training.model import ModelConfig, Qwen3  # noqa: E402
from demo_training.train import TrainingConfig  # noqa: E402
from demo_training.train_eagle3 import (  # noqa: E402
    Eagle3Distillation,
    frequent_tokens,
    load_target,
    parse_arguments,
    save_checkpoint,
)
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

FOLDER = Path(CHECKPOINT.path)
TARGET = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    head_dim=16,
)
SMALL = {
    "draft_vocab_size": 24,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def make_head() -> Eagle3:
    torch.manual_seed(1)
    ids = sorted(torch.randperm(64)[:24].tolist())
    head = Eagle3(target_config(TARGET, **SMALL), ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.2)
    return head


def draft_with_transformers(
    head: Eagle3, features: Tensor, embeds: Tensor, start: int
) -> list[Tensor]:
    """Draft after `start` rows: run transformers' Llama layers on them, then on each own output.

    Returns the logits of the last row of `start`, and of each row after it.
    """
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    c: Eagle3Config = head.config
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta,
        attn_implementation="eager",
    )
    attention, mlp = llama.LlamaAttention(config, 0), llama.LlamaMLP(config)
    for name in ("q_proj", "k_proj", "v_proj"):
        size = getattr(attention, name).out_features
        setattr(attention, name, torch.nn.Linear(2 * c.hidden_size, size, bias=False))
    weights = head.state_dict()
    for module, name in ((attention, "self_attn."), (mlp, "mlp.")):
        prefix = f"midlayer.{name}"
        module.load_state_dict(
            {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)}
        )
    rotary = llama.LlamaRotaryEmbedding(config)

    def norm(x: Tensor, name: str) -> Tensor:
        module = llama.LlamaRMSNorm(c.hidden_size, c.rms_norm_eps)
        module.load_state_dict({"weight": weights[name]})
        normed: Tensor = module(x)
        return normed

    x = features[:, :start] @ weights["fc.weight"].T
    logits = []
    while True:
        num_rows = x.shape[1]
        both = torch.cat(
            (
                norm(embeds[:, :num_rows], "midlayer.input_layernorm.weight"),
                norm(x, "midlayer.hidden_norm.weight"),
            ),
            dim=-1,
        )
        causal = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        positions = rotary(x, torch.arange(num_rows)[None])
        out = x + attention(both, positions, causal)[0]
        out = out + mlp(norm(out, "midlayer.post_attention_layernorm.weight"))
        logits.append((norm(out, "norm.weight") @ weights["lm_head.weight"].T)[:, -1])
        if num_rows == embeds.shape[1]:
            return logits
        x = torch.cat((x, out[:, -1:]), dim=1)


def test_unrolled_steps_equal_drafting_with_transformers() -> None:
    head = make_head()
    features, embeds = torch.randn(1, 9, 96), torch.randn(1, 9, 32)
    positions, documents = torch.arange(9)[None], torch.ones(1, 9, dtype=torch.int64)
    rotary = Qwen3(TARGET).rotary(positions)
    with torch.no_grad():
        steps = head(features, embeds, rotary, documents, 4)
        drafted = draft_with_transformers(head, features, embeds, start=6)
    for step, expected in enumerate(drafted):
        ours = steps[step][:, 5 + step]
        assert torch.linalg.norm(ours - expected) < 1e-5 * torch.linalg.norm(expected)


def test_unrolled_steps_do_not_see_other_documents() -> None:
    head = make_head()
    features, embeds = torch.randn(1, 10, 96), torch.randn(1, 10, 32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    documents = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2]])
    rotary = Qwen3(TARGET).rotary(positions)
    with torch.no_grad():
        packed = head(features, embeds, rotary, documents, 3)
        alone = head(
            features[:, 4:],
            embeds[:, 4:],
            Qwen3(TARGET).rotary(positions[:, 4:]),
            documents[:, 4:],
            3,
        )
    for step in range(3):
        torch.testing.assert_close(packed[step][:, 4 + step :], alone[step][:, step:])


def test_a_few_steps_lower_the_loss(tmp_path: Path) -> None:
    config, target = load_target(FOLDER)
    encoder = Encoder(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    token_ids = frequent_tokens(encoder, 1, 20, 256)
    assert len(set(token_ids)) == 256
    sizes = {**SMALL, "draft_vocab_size": 256, "head_dim": config.head_dim}
    torch.manual_seed(1)
    head = Eagle3(target_config(config, **sizes), token_ids)
    head.start_from(target)
    distillation = Eagle3Distillation(target, head)
    shape = Shape(1, 128)
    settings = TrainingConfig(steps=12, shape=shape, warmup=0.1, log_interval=11)
    data = batches(BatchMaker(1, FOLDER / "tokenizer.json", shape), settings.steps, 0)
    log = train(distillation, data, settings, num_steps=2)
    losses = [float(line.split()[3]) for line in log]
    assert losses[-1] < losses[0] - 0.5

    save_checkpoint(head, tmp_path)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" not in weights
    assert (weights["d2t"] + torch.arange(256)).tolist() == token_ids
    assert weights["t2d"].nonzero().flatten().tolist() == token_ids
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_walk_counts_tokens_of_decoding_steps() -> None:
    weights = np.array([[0.1, 1, 1, 1, 1, 1, 0, 0]], np.float32)
    hits = np.zeros((2, 1, 8), np.bool_)
    hits[0, 0, [2, 5]] = True  # the row of the first generated token, and the last row
    hits[1, 0, 3] = True
    result = Acceptance()
    result.walk(hits, weights)
    # Rows 2 to 4 in one step, and row 5 in another one, which has room for one draft.
    assert (result.num_steps, result.num_tokens) == (2, 5)
    assert result.rates == [1.0, 1.0]


def test_head_does_not_replace_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train_eagle3", f"--target={tmp_path}", f"--out={tmp_path / 'x' / '..'}"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "--target" in capsys.readouterr().err
