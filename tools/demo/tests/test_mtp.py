"""The training of the draft layer for multi-token prediction: its unrolled steps, and what changes in the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenspeed_demo import CHECKPOINT

torch = pytest.importorskip("torch", reason="training needs torch")
transformers = pytest.importorskip("transformers")

from demo_training import train_mtp  # noqa: E402
from demo_training.data import BatchMaker, Shape, batches  # noqa: E402
from demo_training.deepseek_v3 import DeepseekV3, DeepseekV3Config  # noqa: E402
from demo_training.distillation import Inputs, train  # noqa: E402
from demo_training.make import save_checkpoint  # noqa: E402
from demo_training.train import TrainingConfig  # noqa: E402
from demo_training.train_mtp import MTPDistillation, load_model, main, save_layer  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

TOKENIZER = Path(CHECKPOINT.path) / "tokenizer.json"


@pytest.fixture
def folder(tmp_path: Path, tiny_deepseek: DeepseekV3Config) -> Path:
    """A checkpoint with random weights."""
    torch.manual_seed(1)
    model = DeepseekV3(tiny_deepseek)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    home = tmp_path / "before"
    home.mkdir()
    save_checkpoint(model, tiny_deepseek, Tokenizer.from_file(str(TOKENIZER)), home)
    (home / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return home


def draft_with_transformers(
    folder: Path, home: Path, hidden: Tensor, embeds: Tensor
) -> list[Tensor]:
    """Draft after the rows of `hidden`: run transformers' model of one layer on them, then on each own output.

    Returns the hidden states of the last row of `hidden`, and of each row after it. That model is written to `home`. Its
    only layer and its norm are those of the draft layer.
    """
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    eps: float = config["rms_norm_eps"]
    renamed = {
        f"model.layers.0.{name.removeprefix(prefix)}": value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    own = {
        name: renamed.pop(f"model.layers.0.{name}.weight").float()
        for name in ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.head")
    }
    renamed["model.norm.weight"] = renamed.pop("model.layers.0.shared_head.norm.weight")
    renamed["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    renamed["lm_head.weight"] = weights["lm_head.weight"]
    home.mkdir()
    save_file(renamed, home / "model.safetensors", metadata={"format": "pt"})
    config.update(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0)
    (home / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).model

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    drafted = []
    while True:
        num_rows = hidden.shape[1]
        both = (norm(embeds[:, :num_rows], own["enorm"]), norm(hidden, own["hnorm"]))
        x = torch.cat(both, dim=-1) @ own["eh_proj"].T
        with torch.no_grad():
            drafted.append(model(inputs_embeds=x).last_hidden_state[:, -1:])
        if num_rows == embeds.shape[1]:
            return drafted
        hidden = torch.cat((hidden, drafted[-1]), dim=1)


def test_unrolled_steps_equal_drafting_with_transformers(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    positions, documents = torch.arange(9)[None], torch.ones(1, 9, dtype=torch.int64)
    hidden, embeds = torch.randn(1, 9, 32), torch.randn(1, 9, 32)
    empty = torch.empty(0)
    inputs = Inputs(
        hidden, embeds, model.rotary(positions), documents, positions, empty, empty, empty
    )
    with torch.no_grad():
        steps = MTPDistillation(model).draft(inputs, 4)
        expected = draft_with_transformers(folder, tmp_path / "layer", hidden[:, :6], embeds)
        for step, each in enumerate(expected):
            logits = model.lm_head(each)[:, 0]
            difference = torch.linalg.norm(steps[step][:, 5 + step] - logits)
            assert difference < 1e-5 * torch.linalg.norm(logits)


def test_training_changes_only_the_draft_layer(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    shape = Shape(1, 128)
    settings = TrainingConfig(steps=20, shape=shape, warmup=0.1, log_interval=19)
    data = batches(BatchMaker(1, TOKENIZER, shape), settings.steps, 0)
    log = train(MTPDistillation(model), data, settings, num_steps=2)
    losses = [float(line.split()[3]) for line in log]
    assert losses[-1] < losses[0] - 0.1

    out = tmp_path / "after"
    save_layer(model, folder, out)
    before, after = (load_file(each / "model.safetensors") for each in (folder, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layer = f"{model.draft_prefix}."
    copies = {f"{layer}embed_tokens.weight", f"{layer}shared_head.head.weight"}
    assert {name for name in before if name.startswith(layer)} - copies >= changed
    assert f"{layer}mlp.experts.3.down_proj.weight" in changed
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert (out / "config.json").read_text() == (folder / "config.json").read_text()


def test_target_may_have_another_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    before = load_file(folder / "model.safetensors")
    monkeypatch.setattr(train_mtp, "run", lambda distillation, arguments: {"seed": arguments.seed})
    monkeypatch.setattr("sys.argv", ["train_mtp", f"--target={folder}", f"--out={link}"])
    main()
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert record == {"draft_layer": {"seed": 3}}, "the target had no record"


def test_rows_may_not_be_shorter_than_those_of_all_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train_mtp", f"--target={tmp_path}", f"--out={tmp_path}", "--max-length=100"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        main()
    assert "--max-length" in capsys.readouterr().err
