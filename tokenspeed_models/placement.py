"""Where activations stand at module boundaries, and the static pass that turns that into collectives.

Modules annotate what they take and give; no model calls a collective. In a group of one process every
placement is the whole tensor, and the pass is the identity. Imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every process of the group holds the whole tensor."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Every process of the group holds its part of one axis, which is named by what it counts."""

    axis: str

    def __str__(self) -> str:
        return f"sharded({self.axis})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every process of the group holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicated | Sharded | Partial


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a module takes and gives, over the process group `group` ("attn", "dense" or "moe")."""

    module: str
    group: str
    takes: Placement
    gives: Placement


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The number of processes that share attention, dense layers and experts."""

    attn: int = 1
    dense: int = 1
    moe: int = 1

    def size(self, group: str) -> int:
        """Return the size of a group; raises ValueError on an unknown one."""
        sizes = {"attn": self.attn, "dense": self.dense, "moe": self.moe}
        if group not in sizes:
            raise ValueError(f"unknown process group {group!r}; there are {', '.join(sizes)}")
        return sizes[group]


@dataclass(frozen=True, slots=True)
class Transition:
    """What happens to an activation between two modules."""

    before: str
    after: str
    collective: str


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """The collectives between modules, in order; none in one process."""

    num_boundaries: int
    transitions: tuple[Transition, ...]

    def explain(self) -> str:
        """Return the plan as lines to print."""
        if not self.transitions:
            return f"collectives: none, {self.num_boundaries} module boundaries in groups of one process"
        lines = (f"  {item.before} -> {item.after}: {item.collective}" for item in self.transitions)
        return "\n".join((f"collectives: {len(self.transitions)}", *lines))


def compile_placements(boundaries: Iterable[Boundary], groups: ProcessGroups) -> CollectivePlan:
    """Return the collectives that a chain of modules needs.

    Raises ValueError where neighbours stand in groups of different sizes above one, or where no collective
    leads from one placement to the next.
    """
    chain = tuple(boundaries)
    transitions = []
    for before, after in pairwise(chain):
        sizes = {groups.size(before.group), groups.size(after.group)} - {1}
        if len(sizes) > 1:
            raise ValueError(
                f"{before.module} and {after.module} stand in groups of {sorted(sizes)}: "
                "neighbours need equal groups, or one of a single process"
            )
        given = before.gives if groups.size(before.group) > 1 else Replicated()
        taken = after.takes if groups.size(after.group) > 1 else Replicated()
        collective = _collective(given, taken, f"{before.module} -> {after.module}")
        if collective is not None:
            transitions.append(Transition(before.module, after.module, collective))
    return CollectivePlan(len(chain), tuple(transitions))


def _collective(given: Placement, taken: Placement, where: str) -> str | None:
    """Return what turns one placement into the other, or None if they are the same."""
    match given, taken:
        case (Replicated(), Replicated()):
            return None
        case (Sharded(first), Sharded(second)) if first == second:
            return None
        case (Partial(), Replicated()):
            return "all_reduce"
        case (Partial(), Sharded(axis)):
            return f"reduce_scatter({axis})"
        case (Sharded(axis), Replicated()):
            return f"all_gather({axis})"
        case (Replicated(), Sharded(axis)):
            return f"slice({axis})"
    raise ValueError(f"{where}: no collective leads from {given} to {taken}")
