"""The training code, with models that a CPU trains in a second."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenspeed_demo import CHECKPOINT

torch = pytest.importorskip("torch", reason="training needs torch")
np = pytest.importorskip("numpy", reason="training needs numpy")

from demo_training.data import BatchMaker, Encoder, Shape, batches, pack  # noqa: E402
from demo_training.deepseek_v3 import DeepseekV3, DeepseekV3Config  # noqa: E402
from demo_training.make import save_checkpoint  # noqa: E402
from demo_training.model import ModelConfig, Qwen3  # noqa: E402
from demo_training.train import (  # noqa: E402
    Loader,
    TrainingConfig,
    learning_rate_scale,
    make_forward,
    train,
    whole_documents_right,
)
from tokenizers import Tokenizer  # noqa: E402
from tokenspeed_demo.items import held_out_set  # noqa: E402

FOLDER = Path(CHECKPOINT.path)
TINY = ModelConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16
)
CPU = torch.device("cpu")


def trained() -> Qwen3:
    from safetensors.torch import load_file

    model = Qwen3(ModelConfig())
    model.load_state_dict(
        {name: weight.float() for name, weight in load_file(FOLDER / "model.safetensors").items()}
    )
    return model


def test_training_model_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32
    ).eval()
    tokens = torch.randint(0, 1536, (2, 40), generator=torch.Generator().manual_seed(1))
    positions, causal = (
        torch.arange(40).expand(2, 40),
        torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(),
    )
    with torch.no_grad():
        (ours,), theirs = trained()(tokens, positions, causal), reference(tokens).logits
    assert torch.linalg.norm(ours - theirs) < 1e-5 * torch.linalg.norm(theirs)


def test_batches_do_not_depend_on_processes() -> None:
    maker = BatchMaker(1, FOLDER / "tokenizer.json", Shape(2, 512))
    here, there = list(batches(maker, 2, 0)), list(batches(maker, 2, 1))
    assert all((a.tokens == b.tokens).all() for a, b in zip(here, there, strict=True))
    assert (here[0].tokens != here[1].tokens).any()


def test_packed_documents_keep_order_and_positions() -> None:
    batch = pack(
        iter([([1, 2], [3]), ([4], [5, 6]), ([9] * 99, [9]), ([7, 8], [9, 10])]), Shape(2, 8)
    )
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0], [7, 8, 9, 10, 0, 0, 0, 0]]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert batch.documents[0].tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert batch.kinds[0].tolist() == [1, 1, 2, 1, 2, 2, 0, 0]


def test_documents_do_not_see_each_other() -> None:
    shape = Shape(1, 8)
    inputs = Loader(shape, CPU, 0.5).load(pack(iter([([1, 2], [3]), ([4], [5, 6])]), shape))
    assert inputs.weights.tolist() == [[0.5, 1, 0, 1, 1, 0, 0, 0]]
    assert isinstance(inputs.mask, torch.Tensor)
    assert inputs.mask[0, 0, 4].tolist() == [False, False, False, True, True, False, False, False]


def test_check_counts_fully_correct_documents() -> None:
    encoder = Encoder(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    shape = Shape(1, 1024)
    batch = pack((encoder.encode(item) for item in held_out_set("sum_two_digits", 10)), shape)
    inputs = Loader(shape, CPU, 0.1).load(batch)
    documents = torch.from_numpy(batch.documents.astype(np.int64))
    with torch.no_grad():
        _, hits = make_forward(trained(), CPU)(inputs)
        assert whole_documents_right(hits, inputs, documents) == 1.0
        hits[:, inputs.weights[0].argmax()] = False
        assert whole_documents_right(hits, inputs, documents) == pytest.approx(0.9)


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(1)
    shape = Shape(1, 256)
    config = TrainingConfig(steps=30, shape=shape, warmup=0.1, log_interval=29, check_interval=1000)
    maker = BatchMaker(1, FOLDER / "tokenizer.json", shape)
    log = train(Qwen3(TINY), batches(maker, config.steps, 0), {}, config, CPU)
    losses = [float(line.split()[3]) for line in log if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.3


def test_deepseek_equals_transformers(tmp_path: Path, tiny_deepseek: DeepseekV3Config) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shape = Shape(1, 256)
    config = TrainingConfig(steps=6, shape=shape, log_interval=5, check_interval=1000)
    model = DeepseekV3(tiny_deepseek)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    log = train(
        model, batches(BatchMaker(1, FOLDER / "tokenizer.json", shape), 6, 0), {}, config, CPU
    )
    losses = [float(line.split()[3]) for line in log if line.startswith("step")]
    assert losses[-1] < losses[0]
    biases = [value for name, value in model.named_buffers() if "bias" in name]
    assert len(biases) == 2, "of a sparse layer and of the draft layer"
    assert all(bias.any() for bias in biases)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    save_checkpoint(model, tiny_deepseek, tokenizer, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 1536, (2, 40), generator=torch.Generator().manual_seed(1))
    causal = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with torch.no_grad():
        ours, _ = model(tokens, torch.arange(40).expand(2, 40), causal)
        theirs = reference(tokens).logits
    assert torch.linalg.norm(ours - theirs) < 1e-5 * torch.linalg.norm(theirs)


def test_learning_rate_rises_then_falls_to_zero() -> None:
    scales = [learning_rate_scale((step + 0.5) / 1000, 0.02) for step in range(1000)]
    assert scales.index(max(scales)) in (19, 20)
    assert max(scales) == pytest.approx(1)
    assert scales[-1] < 1e-4
