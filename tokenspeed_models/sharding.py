"""How activations are sharded at module boundaries, and the collectives that follow from it.

Layers annotate their inputs and outputs; no model calls a collective. `plan_collectives` compiles the annotations
for given process groups. With one process per group the plan is empty. Imports no tensor library.
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
    """Every process of the group holds a slice along `axis`, such as "heads" or "vocab"."""

    axis: str

    def __str__(self) -> str:
        return f"sharded({self.axis})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every process of the group holds a summand; the tensor is their sum."""

    def __str__(self) -> str:
        return "partial"


Sharding = Replicated | Sharded | Partial


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The sharding of a module's input and output over a process group ("attn", "dense" or "moe")."""

    module: str
    group: str
    input: Sharding
    output: Sharding


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The number of processes that share attention, dense layers and experts."""

    attn: int = 1
    dense: int = 1
    moe: int = 1

    def size(self, group: str) -> int:
        """Return the size of a group. Raises ValueError for an unknown group."""
        sizes = {"attn": self.attn, "dense": self.dense, "moe": self.moe}
        if group not in sizes:
            raise ValueError(f"unknown process group {group!r}; known: {', '.join(sizes)}")
        return sizes[group]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on the activation that flows from one module to the next."""

    source: str
    target: str
    name: str


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """The collectives of a model, in order of computation."""

    num_modules: int
    collectives: tuple[Collective, ...]

    def explain(self) -> str:
        """Return the plan as text, one line per collective."""
        if not self.collectives:
            return f"collectives: none ({self.num_modules} modules)"
        lines = (f"  {each.source} -> {each.target}: {each.name}" for each in self.collectives)
        return "\n".join((f"collectives: {len(self.collectives)}", *lines))


def plan_collectives(specs: Iterable[ShardingSpec], groups: ProcessGroups) -> CollectivePlan:
    """Return the collectives that a chain of modules needs.

    Raises ValueError if two adjacent modules use groups of different sizes (other than 1), or if no collective
    converts the output of one into the input of the next.
    """
    chain = tuple(specs)
    collectives = []
    for source, target in pairwise(chain):
        sizes = {groups.size(source.group), groups.size(target.group)} - {1}
        if len(sizes) > 1:
            raise ValueError(
                f"{source.module} and {target.module} use process groups of different sizes: "
                f"{sorted(sizes)}. Adjacent modules need groups of equal size, or of size 1."
            )
        output = source.output if groups.size(source.group) > 1 else Replicated()
        needed = target.input if groups.size(target.group) > 1 else Replicated()
        name = _collective(output, needed, f"{source.module} -> {target.module}")
        if name is not None:
            collectives.append(Collective(source.module, target.module, name))
    return CollectivePlan(len(chain), tuple(collectives))


def _collective(output: Sharding, needed: Sharding, where: str) -> str | None:
    """Return the collective that converts one sharding into another, or None if they are equal."""
    match output, needed:
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
    raise ValueError(f"{where}: no collective converts {output} to {needed}")
