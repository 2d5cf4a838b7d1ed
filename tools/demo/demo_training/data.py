"""Batches of packed documents, made by processes ahead of the training loop.

A batch depends on the seed and its index alone, never on how many processes make them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenspeed_demo.render import Renderer

from .items import Item
from .tasks import TrainingItems


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of documents packed end to end; all arrays are [rows, length]."""

    tokens: NDArray[np.uint16]
    positions: NDArray[np.int16]  # within the document
    documents: NDArray[np.int16]  # index of the document in its row; padding counts as a document
    kinds: NDArray[np.uint8]  # 0 padding, 1 prompt, 2 completion


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    length: int  # tokens


class Encoder:
    """Encodes items as a server does, with separate token ids for prompt and completion."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer()

    def encode(self, item: Item) -> tuple[list[int], list[int]]:
        """Return the token ids of prompt and completion, including the token that ends the turn."""
        prompt = self._tokenizer.encode(self._renderer.prompt(item), add_special_tokens=False).ids
        completion = self._tokenizer.encode(
            self._renderer.completion(item), add_special_tokens=False
        ).ids
        return prompt, completion


def pack(documents: Iterator[tuple[list[int], list[int]]], shape: Shape) -> Batch:
    """Fill rows first-fit until a document does not fit. Documents longer than a row are skipped."""
    tokens = np.zeros((shape.rows, shape.length), np.uint16)
    positions = np.zeros(tokens.shape, np.int16)
    numbers = np.zeros(tokens.shape, np.int16)
    kinds = np.zeros(tokens.shape, np.uint8)
    used = [0] * shape.rows
    num_documents = [0] * shape.rows
    for prompt, completion in documents:
        size = len(prompt) + len(completion)
        if size > shape.length:
            continue
        row = next((row for row in range(shape.rows) if used[row] + size <= shape.length), None)
        if row is None:
            break
        start, stop = used[row], used[row] + size
        num_documents[row] += 1
        tokens[row, start:stop] = prompt + completion
        positions[row, start:stop] = np.arange(size)
        numbers[row, start:stop] = num_documents[row]
        kinds[row, start : start + len(prompt)] = 1
        kinds[row, start + len(prompt) : stop] = 2
        used[row] = stop
    return Batch(tokens, positions, numbers, kinds)


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes batch number `index` of a seed. A process pool can run it, because it is picklable."""

    seed: int
    tokenizer_file: Path
    shape: Shape

    def __call__(self, index: int) -> Batch:
        encoder = Encoder(Tokenizer.from_file(str(self.tokenizer_file)))
        stream = TrainingItems(f"{self.seed} batch {index}")
        return pack((encoder.encode(stream.next()) for _ in count()), self.shape)


def batches(maker: Callable[[int], Batch], num_batches: int, num_processes: int) -> Iterator[Batch]:
    """Yield batches 0, 1, … in order. `num_processes` processes prepare them in advance (0: this process)."""
    if num_processes == 0:
        yield from map(maker, range(num_batches))
        return
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(maker, range(num_batches))
