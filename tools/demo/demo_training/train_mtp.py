"""Train the draft layer of the DeepSeek-V3 demo further, so that it drafts several tokens in a row.

`python -m demo_training.train_mtp --target FOLDER --out FOLDER [--seconds N] [--seed N]`

The rest of the checkpoint does not change. FOLDER of `--out` may be that of `--target`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .deepseek_v3 import DeepseekV3, DeepseekV3Config, DraftLayer, balance_experts
from .distillation import Distillation, Inputs, add_arguments, parse, run
from .unrolled import Cache, unrolled_mask


def load_model(folder: Path) -> DeepseekV3:
    """Return the model of a checkpoint folder in float32, of which only the draft layer is trained."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DeepseekV3(
        DeepseekV3Config(**{name: content[name] for name in asdict(DeepseekV3Config())})
    )
    model.load_checkpoint(load_file(folder / "model.safetensors"))
    model.float().eval().requires_grad_(False)
    model.draft_layer.requires_grad_(True)
    return model


class MTPDistillation(Distillation):
    """Distils a DeepSeek-V3 model into its own draft layer, which uses the model's embedding and output head."""

    target: DeepseekV3
    layer: DraftLayer

    def __init__(self, model: DeepseekV3) -> None:
        weight = model.lm_head.weight
        super().__init__(
            model, model.draft_layer, torch.arange(weight.shape[0], device=weight.device)
        )

    def run_target(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.target.hidden_states(tokens, positions, mask)
        return hidden, self.target.lm_head(hidden)

    def draft(self, inputs: Inputs, num_steps: int) -> list[Tensor]:
        hidden, cache, logits = inputs.features, Cache(), []
        for step in range(num_steps):
            mask = unrolled_mask(inputs.documents, step)
            hidden = self.layer.draft(hidden, inputs.embeds, *inputs.rotary, mask, cache)
            logits.append(self.target.lm_head(hidden))
            hidden = hidden.roll(1, dims=1)
        return logits

    def after_step(self) -> None:
        """Balance the experts."""
        balance_experts(self.layer)


def save_layer(model: DeepseekV3, target: Path, folder: Path) -> None:
    """Write the checkpoint of `target` with the model's draft layer to a folder."""
    weights = load_file(target / "model.safetensors")
    trained = model.checkpoint()
    for name, old in weights.items():
        if name.startswith(f"{model.draft_prefix}."):
            weights[name] = trained[name].detach().to("cpu", old.dtype).contiguous()
    if folder.resolve() != target.resolve():
        shutil.copytree(target, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the draft layer of the DeepSeek-V3 demo.")
    add_arguments(parser, seed=3)
    arguments = parse(parser)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    model = load_model(arguments.target).to(arguments.device)
    record = run(MTPDistillation(model), arguments)
    save_layer(model, arguments.target, arguments.out)
    file = arguments.out / "training.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content = json.dumps({**before, "draft_layer": record}, indent=1) + "\n"
    file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
