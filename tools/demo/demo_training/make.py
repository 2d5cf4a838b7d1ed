"""Make the demo checkpoint from a seed: tokenizer, training, files.

`python -m demo_training.make --out FOLDER [--architecture NAME] [--steps N] [--seed N]`
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenspeed_demo.render import END_OF_TURN

from .data import BatchMaker, Encoder, Shape, batches
from .deepseek_v3 import DeepseekV3, DeepseekV3Config
from .model import ModelConfig, Qwen3
from .tokenizer import CONTROL, END_OF_TEXT, save_tokenizer, train_tokenizer
from .train import LanguageModel, TrainingConfig, held_out_samples, train

Config = ModelConfig | DeepseekV3Config


def make_model(architecture: str, num_layers: int | None) -> tuple[Config, LanguageModel]:
    """Return a configuration and an untrained model."""
    sizes = {} if num_layers is None else {"num_hidden_layers": num_layers}
    if architecture == "qwen3":
        qwen = ModelConfig(**sizes)
        return qwen, Qwen3(qwen)
    deepseek = DeepseekV3Config(**sizes)
    return deepseek, DeepseekV3(deepseek)


def save_checkpoint(
    model: LanguageModel, config: Config, tokenizer: Tokenizer, folder: Path
) -> None:
    """Write weights in bf16, those of the experts' choice in float32, and the two configuration files."""
    weights = {
        name: value.detach().to("cpu", torch.float32 if "bias" in name else torch.bfloat16)
        for name, value in model.checkpoint().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = tokenizer.get_vocab()
    end_of_turn, end_of_text = vocabulary[END_OF_TURN], vocabulary[END_OF_TEXT]
    generation = {
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
    }
    for name, content in (
        ("config.json", config.to_json(end_of_turn, end_of_text)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the demo checkpoint from a seed.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--architecture", choices=("qwen3", "deepseek_v3"), default="qwen3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9_500)
    parser.add_argument("--seconds", type=float, help="of training at most")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--tokenizer-items", type=int, default=30_000, help="conversations the tokenizer sees"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make data"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    model_config, model = make_model(arguments.architecture, arguments.layers)
    tokenizer = train_tokenizer(arguments.seed, model_config.vocab_size, arguments.tokenizer_items)
    save_tokenizer(tokenizer, folder, model_config.max_position_embeddings)
    tokenizer_seconds = time.perf_counter() - start
    print(f"tokenizer of {model_config.vocab_size} tokens: {tokenizer_seconds:.1f} s", flush=True)

    shape = Shape(arguments.rows, arguments.length)
    config = TrainingConfig(arguments.steps, shape, arguments.seconds)
    model.to(device)
    maker = BatchMaker(arguments.seed, folder / "tokenizer.json", shape)
    samples = held_out_samples(Encoder(tokenizer), shape)
    log = train(model, batches(maker, config.steps, arguments.processes), samples, config, device)
    save_checkpoint(model, model_config, tokenizer, folder)
    record = {
        "seed": arguments.seed,
        "architecture": arguments.architecture,
        "model": asdict(model_config),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": asdict(config),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - start, 1),
        "control_tokens": CONTROL,
        "log": log,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['num_parameters']} parameters, {record['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
