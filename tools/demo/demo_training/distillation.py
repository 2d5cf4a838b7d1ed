"""Distillation of a target model into a draft layer, unrolled for several steps."""

from __future__ import annotations

import argparse
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from .data import Batch, BatchMaker, Encoder, Shape, batches
from .train import (
    LanguageModel,
    Optimization,
    TrainingConfig,
    held_out_samples,
)
from .unrolled import unrolled_mask

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch with the target's view of it. Row i is about the token after the next one, i + 2.

    `choices` are the target's most probable tokens, and `probabilities` those of the draft vocabulary. `weights` are 0
    for rows without such a token.
    """

    features: Tensor  # [S, T, hidden], or several of them concatenated
    embeds: Tensor  # [S, T, hidden]
    rotary: tuple[Tensor, Tensor]
    documents: Tensor  # [S, T]
    positions: Tensor  # [S, T]
    choices: Tensor  # [S, T]
    probabilities: Tensor  # [S, T, draft_vocab_size]
    weights: Tensor  # [S, T]


class Distillation(ABC):
    """Computes the loss and the predictions of a draft layer against its target.

    `token_ids`, ascending, are the tokens that the layer can draft.
    """

    def __init__(self, target: LanguageModel, layer: nn.Module, token_ids: Tensor) -> None:
        self.target, self.layer = target, layer
        self.token_ids = token_ids
        self._can_draft = torch.zeros(
            target.model.embed_tokens.num_embeddings, dtype=torch.bool, device=token_ids.device
        )
        self._can_draft[token_ids] = True
        self._device = token_ids.device
        self._autocast = self._device.type == "cuda"

    @abstractmethod
    def run_target(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that the layer reads, [S, T, features], and the logits of the next token, [S, T, vocab]."""

    @abstractmethod
    def draft(self, inputs: Inputs, num_steps: int) -> list[Tensor]:
        """Return the logits [S, T, tokens that the layer can draft] of each step."""

    @abstractmethod
    def after_step(self) -> None:
        """Update the weights that have no gradients, after each step."""

    @torch.no_grad()
    def load(self, batch: Batch) -> Inputs:
        """Run the target on a batch."""
        tokens, positions, documents, kinds = (
            torch.from_numpy(each.astype(np.int64)).to(self._device)
            for each in (batch.tokens, batch.positions, batch.documents, batch.kinds)
        )
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            mask = unrolled_mask(documents, 0)
            features, logits = self.run_target(tokens, positions, mask)
            logits = logits.float().roll(-1, dims=1)
        following = kinds.roll(-2, dims=1)
        following[documents.roll(-2, dims=1) != documents] = 0
        following[:, -2:] = 0
        weight_of = torch.tensor([0.0, PROMPT_WEIGHT, 1.0], device=self._device)
        return Inputs(
            features=features,
            embeds=self.target.model.embed_tokens(tokens.roll(-1, dims=1)),
            rotary=self.target.rotary(positions),
            documents=documents,
            positions=positions,
            choices=logits.argmax(-1),
            probabilities=logits[..., self.token_ids].softmax(-1),
            weights=weight_of[following],
        )

    def _logits(self, inputs: Inputs, num_steps: int) -> list[Tensor]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            return self.draft(inputs, num_steps)

    def loss(self, inputs: Inputs, num_steps: int) -> Tensor:
        """Return the cross entropy with the target's probabilities, a weighted mean over all steps."""
        weights = inputs.weights * self._can_draft[inputs.choices]
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
        return self.token_ids[drafts] == inputs.choices


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
        """The share of accepted drafts at each position, given that all drafts before it were accepted."""
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
    distillation: Distillation, data: Iterable[Batch], config: TrainingConfig, num_steps: int
) -> list[str]:
    """Train the layer in place. Print the log, and return its lines."""
    log: list[str] = []
    optimization = Optimization(distillation.layer, config)
    for step, batch in enumerate(data):
        is_last = optimization.begin(step)
        loss = distillation.loss(distillation.load(batch), num_steps)
        optimization.update(loss)
        distillation.after_step()
        if step % config.log_interval == 0 or is_last:
            log.append(f"step {step} loss {loss.item():.4f} {optimization.seconds:.1f} s")
            print(log[-1], flush=True)
        if is_last:
            break
    return log


def report(results: dict[str, Acceptance]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"{'held-out set':26} {'tokens/step':>11}  accepted at each position"
    for task, result in results.items():
        rates = " ".join(f"{rate:.3f}" for rate in result.rates)
        yield f"{task:26} {result.tokens_per_step:11.2f}  {rates}"


def add_arguments(parser: argparse.ArgumentParser, *, seed: int) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("--target", type=Path, required=True, help="checkpoint of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=200, help="of training at most")
    parser.add_argument("--unrolled", type=int, default=6, help="draft steps in training")
    parser.add_argument("--drafts", type=int, default=8, help="draft steps in the final check")
    parser.add_argument("--scale", type=int, default=1, help="divisor of the rows of a batch")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a row at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make data"
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments. Exits if no batch has rows of at most `--max-length` tokens."""
    arguments = parser.parse_args()
    shortest = min(shape.length for shape in SHAPES)
    if arguments.max_length < shortest:
        parser.error(f"--max-length is {arguments.max_length}, expected at least {shortest}")
    return arguments


def run(distillation: Distillation, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the layer, check it with held-out items, and return a record of both for training.json."""
    start = time.perf_counter()
    device = torch.device(arguments.device)
    shapes = tuple(
        Shape(max(1, each.rows // arguments.scale), each.length)
        for each in SHAPES
        if each.length <= arguments.max_length
    )
    config = TrainingConfig(arguments.steps, shapes[0], arguments.seconds)
    tokenizer_file = arguments.target / "tokenizer.json"
    maker = MixedBatchMaker(arguments.seed, tokenizer_file, shapes)
    data = batches(maker, config.steps, arguments.processes)
    log = train(distillation, data, config, arguments.unrolled)
    encoder = Encoder(Tokenizer.from_file(str(tokenizer_file)))
    samples = held_out_samples(encoder, Shape(shapes[0].rows, min(1024, arguments.max_length)))
    results = check(distillation, samples, arguments.drafts)
    for line in report(results):
        print(line, flush=True)
    num_parameters = sum(parameter.numel() for parameter in distillation.layer.parameters())
    seconds = round(time.perf_counter() - start, 1)
    print(f"{num_parameters} parameters, {seconds} s", flush=True)
    return {
        "seed": arguments.seed,
        "num_parameters": num_parameters,
        "unrolled": arguments.unrolled,
        "shapes": [asdict(shape) for shape in shapes],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": seconds,
        "log": log,
        "held_out": {
            task: {"tokens_per_step": round(each.tokens_per_step, 3), "accepted": each.rates}
            for task, each in results.items()
        },
    }
