"""The experts of a layer that a process computes."""

from __future__ import annotations

import torch

from tokenspeed_core.api import BuildContext, ExpertBalance, MovableExperts


class LocalExperts:
    """The `num` experts of this process, and their choice among those of a token.

    `num_slots` includes those for `num_redundant` replicas on all processes together. Raises ValueError if the
    processes of the group "experts" cannot divide the experts, or have room for more replicas than there can be.
    """

    def __init__(self, build: BuildContext, num_experts: int, num_redundant: int = 0) -> None:
        group = build.group("experts")
        if num_experts % group.size:
            raise ValueError(
                f"{num_experts} experts cannot be divided among {group}. Choose sizes that divide them."
            )
        max_redundant = num_experts * (group.size - 1)
        if num_redundant > max_redundant:
            raise ValueError(
                f"--num-redundant-experts {num_redundant} is more than {max_redundant}, which is enough for all "
                f"{num_experts} experts on each of {group}"
            )
        self.num, self.is_all = num_experts // group.size, group.size == 1
        self.num_slots = self.num + num_redundant // group.size
        self._rank, self._num_processes = group.rank, group.size
        self._local_ids = self._own_slots(build)
        self._tokens = build.token_counts

    def let_move(self, weights: tuple[torch.Tensor, ...]) -> None:
        """Do nothing: these experts stay."""

    def take(self, layers: list[str]) -> list[str]:
        """Return this process's part of names in the order of the experts."""
        size = len(layers) // self._num_processes
        return layers[self._rank * size : (self._rank + 1) * size]

    def owners(self) -> torch.Tensor:
        """Return the process of each place, int32 [places]. All processes have the same number of slots."""
        device = self._local_ids.device
        ranks = torch.arange(self._num_processes, dtype=torch.int32, device=device)
        return ranks.repeat_interleave(self.num_slots)

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Return where experts `ids` [T, k] are: their process times `num_slots`, plus their slot there."""
        return ids

    def choose(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slots, int32 [T, k], of the experts `ids`, or of their places if tokens are routed.

        Slots of other processes' experts, and of padding tokens, become `num_slots`, which the ops skip.
        """
        return self._without_padding(self._local_ids.index_select(0, ids.flatten()).view(ids.shape))

    def _without_padding(self, slots: torch.Tensor) -> torch.Tensor:
        """Replace the slots [T, k] of padding tokens in place."""
        padding = self._tokens.padding
        return slots if padding is None else slots.masked_fill_(padding[:, None], self.num_slots)

    def _own_slots(self, build: BuildContext) -> torch.Tensor:
        """Return the slot of each place, int32 [places], `num_slots` for those of other processes."""
        num_places = self._num_processes * self.num_slots
        slots = torch.full((num_places,), self.num_slots, dtype=torch.int32, device=build.device)
        first = self._rank * self.num_slots
        slots[first : first + self.num_slots] = torch.arange(self.num_slots, dtype=torch.int32)
        return slots


class BalancedExperts(LocalExperts):
    """Experts that the engine moves between processes. Those with a high load may have replicas, which take turns."""

    def __init__(self, build: BuildContext, num_experts: int, balance: ExpertBalance) -> None:
        super().__init__(build, num_experts, balance.num_redundant)
        self._balance, self._routes_tokens = balance, build.routes_tokens
        self._num_turns = balance.num_turns
        self._loads = torch.zeros(num_experts, dtype=torch.int64, device=build.device)
        self._one = torch.ones((), dtype=torch.int64, device=build.device)
        expert = torch.arange(num_experts, device=build.device)
        first = expert // self.num * self.num_slots + expert % self.num
        if not self._routes_tokens:
            first = self._local_ids[first]
        self._table = first.to(torch.int32)[:, None].repeat(1, self._num_turns)

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Count the experts of this process's tokens, and return a place of each. Replicas take turns."""
        return self._take_turns(ids)

    def choose(self, ids: torch.Tensor) -> torch.Tensor:
        """Return slots as `LocalExperts.choose` does. Unless tokens are routed, count the experts of all tokens.

        All processes see the same tokens then, so that one of them computes each pair.
        """
        if self._routes_tokens:
            return super().choose(ids)
        return self._without_padding(self._take_turns(ids))

    def _take_turns(self, ids: torch.Tensor) -> torch.Tensor:
        """Count the experts `ids` [T, k] of all tokens except padding, and return their entries of the table."""
        padding = self._tokens.padding
        counted = self._one if padding is None else (~padding).long()[:, None]
        self._loads.index_add_(0, ids.flatten(), counted.expand(ids.shape).flatten())
        turns = torch.arange(len(ids), dtype=torch.int32, device=ids.device) % self._num_turns
        entries = ids * self._num_turns + turns[:, None]
        return self._table.flatten().index_select(0, entries.flatten()).view(ids.shape)

    def let_move(self, weights: tuple[torch.Tensor, ...]) -> None:
        """Let the engine move the experts, with weights [slots, ...]."""
        self._balance.layers.append(
            MovableExperts(
                self.num_slots, self._loads, weights, self._table, has_places=self._routes_tokens
            )
        )


def local_experts(build: BuildContext, num_experts: int) -> LocalExperts:
    """Return the experts of this process, which move if the engine balances their load.

    Raises ValueError as `LocalExperts` does.
    """
    balance = build.expert_balance
    if balance is None:
        return LocalExperts(build, num_experts)
    return BalancedExperts(build, num_experts, balance)
