"""Distil the demo model into an EAGLE-3 draft head.

`python -m demo_training.train_eagle3 --target FOLDER --out FOLDER [--seconds N] [--seed N]`
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .data import Encoder
from .distillation import Distillation, Inputs, add_arguments, parse, run
from .eagle3 import Eagle3, target_config
from .model import ModelConfig, Qwen3
from .tasks import TrainingItems


def load_target(folder: Path) -> tuple[ModelConfig, Qwen3]:
    """Return the demo model of a checkpoint folder, in float32."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(**{name: content[name] for name in asdict(ModelConfig())})
    model = Qwen3(config)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return config, model.eval().requires_grad_(False)


def frequent_tokens(encoder: Encoder, seed: int, num_items: int, num_tokens: int) -> list[int]:
    """Return the most frequent tokens of completions, ascending."""
    items = TrainingItems(f"{seed} vocabulary")
    counts: Counter[int] = Counter()
    for _ in range(num_items):
        counts.update(encoder.encode(items.next())[1])
    found = [token for token, _ in counts.most_common(num_tokens)]
    others = (token for token in count() if token not in counts)
    return sorted([*found, *islice(others, num_tokens - len(found))])


class Eagle3Distillation(Distillation):
    """Distils a Qwen3 model into a head that reads the outputs of several layers."""

    target: Qwen3
    layer: Eagle3

    def __init__(self, target: Qwen3, head: Eagle3) -> None:
        super().__init__(target, head, head.token_ids)

    def run_target(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        outputs = list(self.target.layer_outputs(tokens, positions, mask))
        features = torch.cat([outputs[layer] for layer in self.layer.config.layers], dim=-1)
        return features, self.target.logits(outputs[-1])

    def draft(self, inputs: Inputs, num_steps: int) -> list[Tensor]:
        logits: list[Tensor] = self.layer(
            inputs.features, inputs.embeds, inputs.rotary, inputs.documents, num_steps
        )
        return logits

    def after_step(self) -> None:
        """Do nothing."""


def save_checkpoint(head: Eagle3, folder: Path) -> None:
    """Write the two files of a published head."""
    weights = {name: value.cpu().contiguous() for name, value in head.checkpoint().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.dumps(head.config.to_json(), indent=2) + "\n"
    (folder / "config.json").write_text(content, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distil the demo model into an EAGLE-3 head.")
    add_arguments(parser, seed=2)
    parser.add_argument("--draft-vocabulary", type=int, default=1024, help="tokens")
    parser.add_argument(
        "--vocabulary-items", type=int, default=2_000, help="conversations to count"
    )
    arguments = parse(parser)
    if arguments.out.resolve() == arguments.target.resolve():
        parser.error(
            "--out is the folder of --target; choose another one, or the head replaces the model"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    model_config, target = load_target(arguments.target)
    encoder = Encoder(Tokenizer.from_file(str(arguments.target / "tokenizer.json")))
    num_tokens = min(arguments.draft_vocabulary, model_config.vocab_size)
    token_ids = frequent_tokens(encoder, arguments.seed, arguments.vocabulary_items, num_tokens)
    head = Eagle3(target_config(model_config, draft_vocab_size=num_tokens), token_ids)
    head.start_from(target)
    device = torch.device(arguments.device)
    record = run(Eagle3Distillation(target.to(device), head.to(device)), arguments)
    save_checkpoint(head, folder)
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
