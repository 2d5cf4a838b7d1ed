"""Moves experts between processes, so that all have about the same load (EPLB).

All processes execute the same steps. Every `--eplb-interval` steps they add up how often each expert was chosen, plan a
placement from that sum, and then move the experts of one layer before each of the next steps. So no step waits for the
moves of more than one layer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tokenspeed_core.api.experts import ExpertBalance, MovableExperts
from tokenspeed_core.api.parallel import ParallelLayout, ProcessGroup
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.executor.expert_placement import (
    I32,
    Move,
    find_moves,
    first_placement,
    place_table,
    rank_loads,
    rebalance,
    turn_table,
)

READ_LAG = 2  # steps from the sum of the loads to its use, so that the host does not wait
log = logging.getLogger("tokenspeed.worker")


class ExpertBalancer:
    """Balances the experts of a model on this process, together with the other processes."""

    def __init__(
        self,
        balance: ExpertBalance,
        layout: ParallelLayout,
        handles: Mapping[str, Any],
        interval: int,
    ) -> None:
        """Allocate memory for the experts that move in one step.

        Raises ConfigError if the model has no experts that can be moved.
        """
        if not balance.layers:
            raise ConfigError(
                "--enable-eplb: the model has no experts that can be moved. Remove the flag."
            )
        group = layout.group("experts")
        self.num_moves = 0
        self._layers, self._interval, self._logs = balance.layers, interval, layout.rank == 0
        self._rank = group.rank
        self._world = handles["world"]
        self._mover = _Mover(group, handles["experts"], balance.layers[0])
        num_experts = [len(layer.loads) for layer in balance.layers]
        self._placements = [
            first_placement(each, group.size, balance.num_redundant) for each in num_experts
        ]
        self._host = torch.zeros(
            (len(num_experts), max(num_experts)),
            dtype=torch.int64,
            pin_memory=balance.layers[0].loads.is_cuda,
        )
        self._copied: torch.cuda.Event | None = None
        self._num_steps = 0
        self._read_at = 0  # the step before which the sum of the loads is read
        self._planned: deque[tuple[int, I32]] = deque()  # layers whose experts have not moved yet

    def start(self) -> None:
        """Set the loads to zero, for example after the warm-up."""
        for layer in self._layers:
            layer.loads.zero_()

    def begin_step(self) -> None:
        """Plan or move experts before the next step. All processes call it before each step."""
        self._num_steps += 1
        if self._planned:
            self._move(*self._planned.popleft())
        elif self._num_steps == self._read_at:
            self._plan()
        elif self._num_steps % self._interval == 0:
            self._add_up()
            self._read_at = self._num_steps + READ_LAG

    def _add_up(self) -> None:
        """Add up the loads on all processes, so that all plan the same, and start to copy them to the host."""
        loads = torch.nn.utils.rnn.pad_sequence([layer.loads for layer in self._layers], True)
        dist.all_reduce(loads, group=self._world)
        self._host.copy_(loads, non_blocking=True)
        self.start()
        if loads.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _plan(self) -> None:
        """Plan the placements of all layers."""
        if self._copied is not None:
            self._copied.synchronize()
        before, after = [], []
        for index, (layer, placement) in enumerate(
            zip(self._layers, self._placements, strict=True)
        ):
            loads = self._host[index, : len(layer.loads)].numpy()
            planned = rebalance(loads, placement)
            if planned is placement:
                continue
            self._planned.append((index, planned))
            mean = max(1.0, loads.sum() / len(placement))
            before.append(rank_loads(loads, placement).max() / mean)
            after.append(rank_loads(loads, planned).max() / mean)
        if self._planned and self._logs:
            log.info(
                "rebalancing the experts of %d of %d layers: in these layers, the highest load of a process falls from %.2f to "
                "%.2f times the mean",
                len(self._planned),
                len(self._layers),
                np.mean(before),
                np.mean(after),
            )

    def _move(self, index: int, planned: I32) -> None:
        """Move the experts of a layer."""
        layer = self._layers[index]
        moves = find_moves(self._placements[index], planned)
        self._mover.run(layer, moves)
        self.num_moves += len(moves)
        self._placements[index] = planned
        num_experts = len(layer.loads)
        table = (
            place_table(planned, num_experts)
            if layer.has_places
            else turn_table(planned, self._rank, num_experts)
        )
        layer.table.copy_(torch.from_numpy(table))


class _Mover:
    """Copies weights between the processes of a group."""

    def __init__(self, group: ProcessGroup, handle: Any, layer: MovableExperts) -> None:
        self._group, self._handle = group, handle
        # Moves read the old contents of all slots before the first one is overwritten.
        self._received = [torch.empty_like(each) for each in _bytes(layer)]

    def run(self, layer: MovableExperts, moves: Sequence[Move]) -> None:
        """Copy the experts of a layer. All processes of the group call it with the same moves."""
        rank, weights, operations = self._group.rank, _bytes(layer), []
        for tag, move in enumerate(moves):
            for weight, received in zip(weights, self._received, strict=True):
                source, target = weight[move.from_slot], received[move.to_slot]
                if move.from_rank == move.to_rank == rank:
                    target.copy_(source)
                elif move.from_rank == rank:
                    peer = self._group.ranks[move.to_rank]
                    operations.append(dist.P2POp(dist.isend, source, peer, self._handle, tag))
                elif move.to_rank == rank:
                    peer = self._group.ranks[move.from_rank]
                    operations.append(dist.P2POp(dist.irecv, target, peer, self._handle, tag))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        slots = [move.to_slot for move in moves if move.to_rank == rank]
        for weight, received in zip(weights, self._received, strict=True):
            for slot in slots:
                weight[slot].copy_(received[slot])


def _bytes(layer: MovableExperts) -> list[torch.Tensor]:
    """Return the weights as bytes [slots, size]. Not every backend sends every dtype."""
    return [each.view(layer.num_slots, -1).view(torch.uint8) for each in layer.weights]
