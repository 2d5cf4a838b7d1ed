"""Experts that the engine moves between processes, to balance their load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class MovableExperts:
    """The experts of a layer on this process, in slots. Slots after the experts of the checkpoint are unused at first."""

    num_slots: int
    loads: torch.Tensor  # int64 [experts], pairs of a token and an expert that the layer counted
    weights: tuple[torch.Tensor, ...]  # each contiguous, [slots, ...]
    # int32 [experts, turns]: the slot that computes a token's expert, or `num_slots` for none here. Turns alternate by
    # the index of the token.
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """What a build asks of layers with experts if the engine balances their load. Each layer appends its experts."""

    num_redundant: int  # slots of all processes of the group "experts", beyond one for each expert
    num_turns: int
    layers: list[MovableExperts] = field(default_factory=list)
