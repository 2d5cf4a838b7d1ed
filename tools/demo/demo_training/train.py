"""The training loop: packed rows, one loss over completions, Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenspeed_demo.items import REQUIRED, held_out_set
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .data import Batch, Encoder, Shape, pack
from .deepseek_v3 import DeepseekV3
from .model import Qwen3

LanguageModel = Qwen3 | DeepseekV3
DRAFT_WEIGHT = 0.3  # of the loss of tokens after the next one


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """`seconds` ends the training earlier than `steps`. The learning rate then falls to zero by that time."""

    steps: int
    shape: Shape
    seconds: float | None = None
    matrix_learning_rate: float = 4e-3  # Muon, scaled to the update size of AdamW
    other_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.02  # share of the steps
    # Weight of a prompt token in the loss; a completion token has weight 1.
    prompt_weight: float = 0.03
    log_interval: int = 100  # steps
    check_interval: int = 1000  # steps


@dataclass(slots=True)
class Inputs:
    """A batch on the device. The type of `mask` fits the device's attention."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    mask: BlockMask | Tensor


class Loader:
    """Copies batches to the device. Their documents share one buffer, so one compiled mask is enough."""

    def __init__(self, shape: Shape, device: torch.device, prompt_weight: float) -> None:
        self._shape = shape
        self._device = device
        self._prompt_weight = prompt_weight
        documents = torch.zeros(shape.rows, shape.length, dtype=torch.int32, device=device)
        self._documents = documents
        self._block_mask = torch.compile(create_block_mask) if device.type == "cuda" else None

        def visible(s: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[s, q] == documents[s, k])

        self._visible = visible

    def _mask(self) -> BlockMask | Tensor:
        rows, length = self._shape.rows, self._shape.length
        if self._block_mask is not None:
            mask: BlockMask = self._block_mask(
                self._visible, rows, None, length, length, device=self._device
            )
            return mask
        same = self._documents[:, None, :, None] == self._documents[:, None, None, :]
        return same & torch.ones(length, length, dtype=torch.bool, device=self._device).tril()

    def load(self, batch: Batch) -> Inputs:
        """Return a batch's inputs. Targets are the next tokens; the last token of a document has none."""
        following = np.zeros_like(batch.kinds)
        following[:, :-1] = np.where(
            batch.documents[:, 1:] == batch.documents[:, :-1], batch.kinds[:, 1:], 0
        )
        targets = np.zeros(batch.tokens.shape, np.int64)
        targets[:, :-1] = batch.tokens[:, 1:]
        weights = np.array([0.0, self._prompt_weight, 1.0], np.float32)[following]
        self._documents.copy_(torch.from_numpy(batch.documents.astype(np.int32)))
        return Inputs(
            tokens=torch.from_numpy(batch.tokens.astype(np.int64)).to(self._device),
            positions=torch.from_numpy(batch.positions.astype(np.int64)).to(self._device),
            targets=torch.from_numpy(targets).to(self._device),
            weights=torch.from_numpy(weights).to(self._device),
            mask=self._mask(),
        )


def learning_rate_scale(progress: float, warmup: float) -> float:
    """Return the learning rate's factor at a share of the training: a linear warm-up, then a cosine to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def make_optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_table = "embed" in name or "lm_head" in name
        (others if is_table or parameter.dim() != 2 else matrices).append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=config.matrix_learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            others, lr=config.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        ),
    ]


class Optimization:
    """Updates a model's weights, at a learning rate that falls to zero after `config.steps` or `config.seconds`."""

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        """Start the clock."""
        self._model, self._config = model, config
        self._optimizers = make_optimizers(model, config)
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._start

    def begin(self, step: int) -> bool:
        """Set the learning rates of a step, counted from 0. Return whether it is the last one."""
        config = self._config
        time_share = self.seconds / (config.seconds or math.inf)
        scale = learning_rate_scale(max((step + 0.5) / config.steps, time_share), config.warmup)
        rates = config.matrix_learning_rate, config.other_learning_rate
        for optimizer, rate in zip(self._optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        return step + 1 == config.steps or time_share > 1

    def update(self, loss: Tensor) -> None:
        """Update the weights by the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


Forward = Callable[[Inputs], tuple[Tensor, Tensor]]


def make_forward(model: LanguageModel, device: torch.device) -> Forward:
    """Return a function that computes the loss, and which targets are the top-1 prediction."""

    def compute(
        tokens: Tensor,
        positions: Tensor,
        targets: Tensor,
        weights: Tensor,
        mask: BlockMask | Tensor,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            logits, *drafts = model(tokens, positions, mask)
        logits = logits.float()
        hits = logits.argmax(-1) == targets
        loss = _loss(logits, targets, weights)
        for draft in drafts:
            # The last token of a document has the weight 0, and no token after the next one.
            targets = targets.roll(-1, dims=1)
            weights = weights.roll(-1, dims=1) * (weights > 0)
            loss = loss + DRAFT_WEIGHT * _loss(draft.float(), targets, weights)
        return loss, hits

    run = torch.compile(compute, dynamic=False) if device.type == "cuda" else compute

    def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
        return run(inputs.tokens, inputs.positions, inputs.targets, inputs.weights, inputs.mask)

    return forward


def _loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the cross entropy."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def whole_documents_right(hits: Tensor, inputs: Inputs, documents: Tensor) -> float:
    """Return the share of documents in which every completion token is the top-1 prediction."""
    wrong = ~hits & (inputs.weights == 1)
    rows = torch.arange(documents.shape[0], device=documents.device)[:, None] * (
        int(documents.max()) + 1
    )
    numbers = (rows + documents)[documents > 0]
    failed = torch.zeros(int(numbers.max()) + 1, dtype=torch.bool, device=documents.device)
    failed[(rows + documents)[wrong]] = True
    present = torch.unique(numbers)
    return 1 - float(failed[present].float().mean())


def check(
    forward: Forward, loader: Loader, samples: dict[str, Batch], device: torch.device
) -> dict[str, float]:
    """Return `whole_documents_right` for each task's held-out sample."""
    scores = {}
    for task, batch in samples.items():
        inputs = loader.load(batch)
        # Gradients stay on, because without them the graph would be compiled again.
        _, hits = forward(inputs)
        documents = torch.from_numpy(batch.documents.astype(np.int64)).to(device)
        scores[task] = whole_documents_right(hits, inputs, documents)
    return scores


def held_out_samples(encoder: Encoder, shape: Shape) -> dict[str, Batch]:
    """Return one batch of each held-out set."""

    def documents(task: str) -> Iterator[tuple[list[int], list[int]]]:
        return (encoder.encode(item) for item in held_out_set(task))

    return {task: pack(documents(task), shape) for task in REQUIRED}


def train(
    model: LanguageModel,
    data: Iterable[Batch],
    samples: dict[str, Batch],
    config: TrainingConfig,
    device: torch.device,
) -> list[str]:
    """Train `model` in place. Print the log, and return its lines."""
    log: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        log.append(line)

    loader = Loader(config.shape, device, config.prompt_weight)
    forward = make_forward(model, device)
    optimization = Optimization(model, config)
    for step, batch in enumerate(data):
        is_last = optimization.begin(step)
        loss, _ = forward(loader.load(batch))
        optimization.update(loss)
        model.after_step()
        if step % config.log_interval == 0 or is_last:
            say(f"step {step} loss {loss.item():.4f} {optimization.seconds:.1f} s")
        if (step + 1) % config.check_interval == 0 or is_last:
            scores = check(forward, loader, samples, device)
            say("held-out " + " ".join(f"{task} {score:.3f}" for task, score in scores.items()))
        if is_last:
            break
    return log
