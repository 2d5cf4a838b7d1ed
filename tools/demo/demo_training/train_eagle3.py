"""Distil the demo model into an EAGLE-3 draft head.

`python -m demo_training.train_eagle3 --target FOLDER --out FOLDER [--seconds N] [--seed N]`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .data import Batch, BatchMaker, Encoder, Shape, batches
from .eagle3 import Eagle3, target_config
from .model import ModelConfig, Qwen3
from .tasks import TrainingItems
from .train import TrainingConfig, held_out_samples, learning_rate_scale, make_optimizers

# Most conversations are short, and dense attention over long rows is expensive.
SHAPES = (
    Shape(64, 512),
    Shape(64, 512),
    Shape(32, 1024),
    Shape(64, 512),
    Shape(64, 512),
    Shape(4, 4096),
)
STEP_DECAY = 0.8  # the weight of a step in the loss, relative to the step before
PROMPT_WEIGHT = 0.1  # of a prompt token in the loss; a completion token has weight 1


@dataclass(frozen=True, slots=True)
class MixedBatchMaker:
    """Makes batch number `index` of a seed, with one of several shapes in turn."""

    seed: int
    tokenizer_file: Path
    shapes: tuple[Shape, ...]

    def __call__(self, index: int) -> Batch:
        shape = self.shapes[index % len(self.shapes)]
        return BatchMaker(self.seed, self.tokenizer_file, shape)(index)


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


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch with the target's view of it. Row i is about the token after the next one, i + 2.

    `choices` are the target's most probable tokens, and `probabilities` those of the draft vocabulary. `weights` are 0
    for rows without such a token.
    """

    features: Tensor  # [S, T, 3 * hidden]
    embeds: Tensor  # [S, T, hidden]
    rotary: tuple[Tensor, Tensor]
    documents: Tensor  # [S, T]
    positions: Tensor  # [S, T]
    choices: Tensor  # [S, T]
    probabilities: Tensor  # [S, T, draft_vocab_size]
    weights: Tensor  # [S, T]


class Distillation:
    """Computes the head's loss and predictions against its target."""

    def __init__(self, target: Qwen3, head: Eagle3, device: torch.device) -> None:
        self._target, self._head, self._device = target, head, device
        self._token_ids = head.token_ids
        self._autocast = device.type == "cuda"

    @torch.no_grad()
    def load(self, batch: Batch) -> Inputs:
        """Run the target on a batch."""
        tokens, positions, documents, kinds = (
            torch.from_numpy(each.astype(np.int64)).to(self._device)
            for each in (batch.tokens, batch.positions, batch.documents, batch.kinds)
        )
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask = documents[:, None, :, None] == documents[:, None, None, :]
        mask &= causal.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            outputs = list(self._target.layer_outputs(tokens, positions, mask))
            logits = self._target.logits(outputs[-1]).float().roll(-1, dims=1)
        following = kinds.roll(-2, dims=1)
        following[documents.roll(-2, dims=1) != documents] = 0
        following[:, -2:] = 0
        weight_of = torch.tensor([0.0, PROMPT_WEIGHT, 1.0], device=self._device)
        return Inputs(
            features=torch.cat([outputs[layer] for layer in self._head.config.layers], dim=-1),
            embeds=self._target.model.embed_tokens(tokens.roll(-1, dims=1)),
            rotary=self._target.rotary(positions),
            documents=documents,
            positions=positions,
            choices=logits.argmax(-1),
            probabilities=logits[..., self._token_ids].softmax(-1),
            weights=weight_of[following],
        )

    def _logits(self, inputs: Inputs, num_steps: int) -> list[Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            logits: list[Tensor] = self._head(
                inputs.features, inputs.embeds, inputs.rotary, inputs.documents, num_steps
            )
        return logits

    def loss(self, inputs: Inputs, num_steps: int) -> Tensor:
        """Return the cross entropy with the target's probabilities, a weighted mean over all steps."""
        weights = inputs.weights * self._head.t2d[inputs.choices]
        total = torch.zeros((), device=self._device)
        scale = 0.0
        for step, logits in enumerate(self._logits(inputs, num_steps)):
            losses = F.cross_entropy(
                logits.float().flatten(0, 1),
                inputs.probabilities.flatten(0, 1),
                reduction="none",
            )
            valid = (weights * (inputs.positions >= step)).flatten()
            total = total + STEP_DECAY**step * (losses * valid).sum() / valid.sum().clamp(min=1.0)
            scale += STEP_DECAY**step
        return total / scale

    @torch.no_grad()
    def hits(self, inputs: Inputs, num_steps: int) -> Tensor:
        """Return whether the draft of each step and row is the target's choice, bool [num_steps, S, T]."""
        drafts = torch.stack([each.argmax(-1) for each in self._logits(inputs, num_steps)])
        return self._token_ids[drafts] == inputs.choices


@dataclass(slots=True)
class Acceptance:
    """Decoding steps of completions: new tokens per step, and the share of accepted drafts at each position."""

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: NDArray[np.int64] | None = None
    num_accepted: NDArray[np.int64] | None = None

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)

    @property
    def rates(self) -> list[float]:
        """The share of accepted drafts at each position, of those whose predecessors were accepted."""
        if self.num_drafted is None or self.num_accepted is None:
            return []
        return [
            round(float(accepted / max(1, drafted)), 3)
            for drafted, accepted in zip(self.num_drafted, self.num_accepted, strict=True)
        ]

    def walk(self, hits: NDArray[np.bool_], weights: NDArray[np.float32]) -> None:
        """Decode the completions of rows: `hits` [num_steps, S, T] and `weights` [S, T] as in `Inputs`."""
        depth = len(hits)
        if self.num_drafted is None or self.num_accepted is None:
            self.num_drafted, self.num_accepted = np.zeros((2, depth), np.int64)
        # The target itself generates the first token of a completion, from the prompt.
        is_drafted = (weights == 1) & (np.roll(weights, 1, axis=1) == 1)
        for row, is_target in enumerate(is_drafted):
            place, end = 0, len(is_target)
            while place < end:
                if not is_target[place]:
                    place += 1
                    continue
                accepted = 0
                for step in range(depth):
                    if place + step >= end or not is_target[place + step]:
                        break
                    self.num_drafted[step] += 1
                    if not hits[step, row, place + step]:
                        break
                    self.num_accepted[step] += 1
                    accepted += 1
                self.num_steps += 1
                self.num_tokens += accepted + 1
                place += accepted + 1


def check(
    distillation: Distillation, samples: dict[str, Batch], num_drafts: int
) -> dict[str, Acceptance]:
    """Return the acceptance for each task's held-out sample, and for all of them."""
    results, total = {}, Acceptance()
    for task, batch in samples.items():
        inputs = distillation.load(batch)
        hits = distillation.hits(inputs, num_drafts).cpu().numpy()
        weights = inputs.weights.cpu().numpy()
        results[task] = Acceptance()
        results[task].walk(hits, weights)
        total.walk(hits, weights)
    return {**results, "all": total}


def train(
    distillation: Distillation,
    head: Eagle3,
    data: Iterable[Batch],
    config: TrainingConfig,
    num_steps: int,
) -> list[str]:
    """Train the head in place. Print the log, and return its lines."""
    log: list[str] = []
    optimizers = make_optimizers(head, config)
    rates = config.matrix_learning_rate, config.other_learning_rate
    start = time.perf_counter()
    for step, batch in enumerate(data):
        time_share = (time.perf_counter() - start) / (config.seconds or math.inf)
        scale = learning_rate_scale(max((step + 0.5) / config.steps, time_share), config.warmup)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        loss = distillation.loss(distillation.load(batch), num_steps)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        is_last = step + 1 == config.steps or time_share > 1
        if step % config.log_interval == 0 or is_last:
            log.append(
                f"step {step} loss {loss.item():.4f} {time.perf_counter() - start:.1f} s",
            )
            print(log[-1], flush=True)
        if is_last:
            break
    return log


def save_checkpoint(head: Eagle3, folder: Path) -> None:
    """Write the two files of a published head."""
    weights = {name: value.cpu().contiguous() for name, value in head.checkpoint().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.dumps(head.config.to_json(), indent=2) + "\n"
    (folder / "config.json").write_text(content, encoding="utf-8")


def report(results: dict[str, Acceptance]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"{'held-out set':26} {'tokens/step':>11}  accepted at each position"
    for task, result in results.items():
        rates = " ".join(f"{rate:.3f}" for rate in result.rates)
        yield f"{task:26} {result.tokens_per_step:11.2f}  {rates}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distil the demo model into an EAGLE-3 head.")
    parser.add_argument("--target", type=Path, required=True, help="checkpoint of the demo model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=110, help="of training at most")
    parser.add_argument("--unrolled", type=int, default=5, help="draft steps in training")
    parser.add_argument("--drafts", type=int, default=8, help="draft steps in the final check")
    parser.add_argument("--scale", type=int, default=1, help="divisor of the rows of a batch")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a row at most")
    parser.add_argument("--draft-vocabulary", type=int, default=1024, help="tokens")
    parser.add_argument(
        "--vocabulary-items", type=int, default=2_000, help="conversations to count"
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
    model_config, target = load_target(arguments.target)
    tokenizer_file = arguments.target / "tokenizer.json"
    encoder = Encoder(Tokenizer.from_file(str(tokenizer_file)))
    num_tokens = min(arguments.draft_vocabulary, model_config.vocab_size)
    token_ids = frequent_tokens(encoder, arguments.seed, arguments.vocabulary_items, num_tokens)
    head = Eagle3(target_config(model_config, draft_vocab_size=num_tokens), token_ids)
    head.start_from(target)
    head.to(device)
    distillation = Distillation(target.to(device), head, device)

    shapes = tuple(
        Shape(max(1, each.rows // arguments.scale), each.length)
        for each in SHAPES
        if each.length <= arguments.max_length
    )
    config = TrainingConfig(arguments.steps, shapes[0], arguments.seconds)
    maker = MixedBatchMaker(arguments.seed, tokenizer_file, shapes)
    data = batches(maker, config.steps, arguments.processes)
    log = train(distillation, head, data, config, arguments.unrolled)
    save_checkpoint(head, folder)
    samples = held_out_samples(encoder, Shape(shapes[0].rows, min(1024, arguments.max_length)))
    results = check(distillation, samples, arguments.drafts)
    for line in report(results):
        print(line, flush=True)
    record = {
        "seed": arguments.seed,
        "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
        "unrolled": arguments.unrolled,
        "shapes": [asdict(shape) for shape in shapes],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - start, 1),
        "log": log,
        "held_out": {
            task: {"tokens_per_step": round(each.tokens_per_step, 3), "accepted": each.rates}
            for task, each in results.items()
        },
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['num_parameters']} parameters, {record['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
