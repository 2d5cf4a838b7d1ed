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
    loads: (
        torch.Tensor
    )  # int64 [experts], number of tokens routed to each expert, counted by the layer
    weights: tuple[torch.Tensor, ...]  # each contiguous, [slots, ...]
    # int32 [experts, turns]: the slot of each expert, or `num_slots` if another process computes it. Token t uses the
    # column t % turns, so that replicas of an expert take turns.
    table: torch.Tensor
    # The table has places instead: the slot of an expert plus `num_slots` for each process before its own.
    has_places: bool = False


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """The settings of load balancing for layers with experts. Each layer appends its experts to `layers`."""

    num_redundant: int  # slots of all processes of the group "experts", beyond one for each expert
    num_turns: int  # columns of `MovableExperts.table`
    layers: list[MovableExperts] = field(default_factory=list)
