"""The reference sampler: its distribution, and that rows are independent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenspeed_kernels.reference.sampling import sample, uniform

Columns = tuple[Tensor, Tensor, Tensor, Tensor]
DRAWS = 20000
draw = sample({"vocab_size": 12, "dtype": "float32"})


def columns(num: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Columns:
    return (
        torch.full((num,), temperature),
        torch.full((num,), top_k, dtype=torch.int32),
        torch.full((num,), top_p),
        torch.full((num,), min_p),
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 4, 1.0, 0.0),
        (1.3, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.8, 6, 0.9, 0.05),
    ],
)
def test_sampled_distribution_matches_transformers_filters(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 12) * 1.5
    filtered = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        filtered = TopKLogitsWarper(top_k)(None, filtered)
    if top_p < 1:
        filtered = TopPLogitsWarper(top_p)(None, filtered)
    if min_p:
        filtered = MinPLogitsWarper(min_p)(None, filtered)
    expected = filtered.softmax(dim=-1)[0]
    positions = torch.arange(DRAWS)
    ids = draw(
        logits.expand(DRAWS, -1),
        *columns(DRAWS, temperature, top_k, top_p, min_p),
        torch.full((DRAWS,), 77),
        positions,
    )
    found = torch.bincount(ids, minlength=12) / DRAWS
    assert (found[expected == 0] == 0).all()
    # Four standard deviations of a probability of 1/2 in 20,000 draws.
    assert (found - expected).abs().max() < 0.015


def test_temperature_0_breaks_ties_by_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    ids = draw(logits, *columns(2, 0.0, 0, 1.0, 0.0), torch.tensor([5, 6]), torch.tensor([1, 2]))
    assert ids.tolist() == [1, 0]


def test_row_token_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(2)
    logits, seeds, positions = torch.randn(9, 300), torch.arange(9) * 31, torch.arange(9) + 1000
    together = draw(logits, *columns(9, 1.0, 0, 0.95, 0.0), seeds, positions)
    for row in range(9):
        alone = draw(
            logits[row : row + 1],
            *columns(1, 1.0, 0, 0.95, 0.0),
            seeds[row : row + 1],
            positions[row : row + 1],
        )
        assert alone.item() == together[row].item()


def test_hashed_numbers_are_uniform_and_uncorrelated() -> None:
    seeds = torch.arange(300).repeat_interleave(300)
    numbers = uniform(seeds, torch.arange(300).repeat(300))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram = torch.histc(numbers, 20, 0, 1) / len(numbers)
    assert (histogram - 0.05).abs().max() < 0.004
    table = numbers.view(300, 300)
    for neighbors in (
        torch.stack((table[:-1].flatten(), table[1:].flatten())),
        torch.stack((table[:, :-1].flatten(), table[:, 1:].flatten())),
    ):
        assert torch.corrcoef(neighbors)[0, 1].abs() < 0.02


def test_hashed_numbers_equal_splitmix64() -> None:
    """The hash is part of the contract: a seed gives the same tokens on every backend and release."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    for seed, position in ((0, 0), (1, 0), (-5, 7), (2**62, 4095)):
        golden = 0x9E3779B97F4A7C15
        expected = (mix((mix((seed + golden) % 2**64) + position * golden) % 2**64) >> 40) / 2**24
        assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_masked_token_is_never_drawn() -> None:
    logits = torch.full((DRAWS, 12), float("-inf"))
    logits[:, 3], logits[:, 8] = 0.0, -5.0
    ids = draw(
        logits,
        *columns(DRAWS, 1.0, 0, 1.0, 0.0),
        torch.arange(DRAWS),
        torch.zeros(DRAWS, dtype=torch.int64),
    )
    assert set(ids.tolist()) == {3, 8}
