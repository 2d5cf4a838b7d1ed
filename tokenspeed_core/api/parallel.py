"""Process groups and collectives: how the processes of an engine share a model. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Processes that share a part of the model, and this process's place among them.

    `name` is "attn" (attention heads, and the vocabulary of the embedding and the output head), "dense" (features of
    MLPs), "moe" (features of each expert), "experts" (whole experts), "data" (one process of each engine that shares
    experts; each has its engine's tokens), "engine" (all processes of an engine, which have the same tokens) or "world"
    (all processes). `str(group)` is its size and the user's flags, for messages.
    """

    name: str
    rank: int  # this process's index in `ranks`
    ranks: tuple[int, ...]  # the members' ranks in the world, in order
    # The given flags that set the sizes of groups, such as "--tensor-parallel-size 2".
    flags: str = ""

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{self.size} processes ({self.flags})" if self.flags else f"{self.size} processes"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The process groups of one process, by name."""

    rank: int
    world_size: int
    groups: Mapping[str, ProcessGroup]

    def group(self, name: str) -> ProcessGroup:
        """Return a group. Raises ValueError for an unknown name."""
        if name not in self.groups:
            raise ValueError(f"unknown process group {name!r}; known: {', '.join(self.groups)}")
        return self.groups[name]

    @classmethod
    def of(
        cls,
        rank: int,
        *,
        attn: int = 1,
        dense: int = 1,
        moe: int = 1,
        experts: int = 1,
        data: int = 1,
        flags: str = "",
    ) -> ParallelLayout:
        """Return the layout of process `rank` for the sizes of the groups.

        `data` engines share experts and nothing else. An engine has as many processes as the largest of `attn`, `dense` and
        its part of the experts, `moe * experts / data`. "attn" is an engine or a single process. "dense" divides an engine;
        its groups hold copies of the MLPs. "moe" and "experts" together are the world or, with one engine, a single
        process. The processes of an engine, and those of a "dense" or "moe" group, have consecutive ranks. Raises
        ValueError for other sizes, and for a rank outside the world.
        """
        if min(attn, dense, moe, experts, data) < 1:
            raise ValueError("process groups need at least one process each")
        if moe * experts % data:
            raise ValueError(
                f"{data} engines cannot share experts that are divided among {moe * experts} processes. Choose a multiple "
                "of the number of engines."
            )
        sizes = {"attn": attn, "moe x experts": moe * experts // data}
        engine_size = max(dense, *sizes.values())
        if engine_size % dense:
            raise ValueError(
                f"process group dense has {dense} processes, which do not divide the {engine_size} processes of an engine. "
                "Choose a divisor."
            )
        for name, size in sizes.items():
            is_shared = data > 1 and name == "moe x experts"
            if size != engine_size and (size > 1 or is_shared):
                raise ValueError(
                    f"process group {name} has {size} processes per engine and an engine has {engine_size}. A group needs "
                    f"all processes{'' if is_shared else ' or one'}. Choose equal sizes."
                )
        world_size = engine_size * data
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} processes")
        world = tuple(range(world_size))
        first, place = rank - rank % engine_size, rank % engine_size
        engine = world[first : first + engine_size]
        members = {
            "attn": engine if attn > 1 else (rank,),
            "dense": _consecutive(rank, dense),
            "moe": _consecutive(rank, moe),
            "experts": world[rank % moe :: moe] if experts > 1 else (rank,),
            "data": world[place::engine_size] if data > 1 else (rank,),
            "engine": engine,
            "world": world,
        }
        groups = {
            name: ProcessGroup(name, ranks.index(rank), ranks, flags)
            for name, ranks in members.items()
        }
        return cls(rank, world_size, MappingProxyType(groups))


def _consecutive(rank: int, size: int) -> tuple[int, ...]:
    """Return the group of `rank`, if ranks are divided into groups of `size` consecutive ones."""
    first = rank - rank % size
    return tuple(range(first, first + size))


ONE_PROCESS = ParallelLayout.of(0)


class TokenCounts:
    """How many tokens each process of the group "data" has in the current step, in the order of their ranks.

    `padding` is a bool tensor [tokens of all these processes], True for padding tokens, which experts skip. None: unknown.
    """

    __slots__ = ("_counts", "_num_processes", "padding")

    def __init__(self, num_processes: int) -> None:
        """Begin with no counts: `of` assumes that all processes have as many tokens as this one."""
        self._num_processes = num_processes
        self.padding: Any = None
        self._counts: tuple[int, ...] | None = None

    def begin(self, counts: tuple[int, ...] | None) -> None:
        """Set the numbers of tokens of the next step; None: all processes have as many as this one."""
        self._counts = counts

    def of(self, num_tokens: int) -> tuple[int, ...]:
        """Return the number of tokens of each process. This process has `num_tokens`."""
        return self._counts or (num_tokens,) * self._num_processes


@dataclass(frozen=True, slots=True)
class CommGroup:
    """A process group, its torch.distributed handle and its tokens, for the kernels of the family "comm".

    A kernel that waits on the device for other processes passes `on_abort` a function that makes it stop waiting. The
    function is called from another thread when a process died.
    """

    group: ProcessGroup
    handle: Any
    tokens: TokenCounts = field(default_factory=lambda: TokenCounts(1))
    on_abort: Callable[[Callable[[], None]], None] = lambda stop_waiting: None


SAMPLING = "sampling"
"""The module that takes the logits, which only the last tokens of sequences have."""

FUSED_PARTS = ("all_reduce", "add_rms_norm")
"""The ops that FUSED_OP replaces."""

FUSED_OP = "all_reduce_add_rms_norm"
"""An all-reduce, the residual addition and the RMS norm after it. `QuantizationScheme.fused` may map it to an op that
also quantizes the result."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on the activation that flows from one module to the next."""

    op: str  # "all_reduce", "all_gather", "all_gather_tokens", "reduce_scatter_tokens" or "exchange_tokens"
    group: str  # name of the process group
    size: int  # values of a token in the result
    dtype: str
    source: str  # module that computes the activation
    target: str  # module that takes it
    reason: str  # why the collective is needed, for display
    share: float = 1.0  # of the other processes that get a token
    max_fused_tokens: int = 0  # steps of at most this many run `fused_op` instead, 0: none
    fused_op: str = FUSED_OP


class Overlap(Protocol):
    """Sends partial sums (summands) to the other processes while later ones are computed.

    Calls of `send` and `receive` alternate, in the same order in all processes.
    """

    min_num_tokens: int

    def send(self, compute: Callable[[Any], Any], x: Any) -> SentSummands:
        """Compute partial sums [T, N] of x, a tensor [T, ...] or a tuple of them, in parts. Send each part at once.

        `compute` takes and returns rows. T is at least `min_num_tokens`.
        """

    def receive(self, sent: SentSummands, residual: Any, weight: Any, eps: float) -> Any:
        """Return the result of the fused kernel for these partial sums."""


@dataclass(frozen=True, slots=True)
class SentSummands:
    """Partial sums of this process, as consecutive parts [rows, N], which are being sent to the other processes."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class FusedCollective:
    """An all-reduce that may be fused with the residual addition and the RMS norm after it.

    `kernel` computes the fused op for at most `max_num_tokens` rows. If it `quantizes`, it returns values, scales and
    the residual instead of the norm and the residual. `all_reduce` is for more rows. A kernel may have an `overlap`.
    """

    kernel: Callable[..., Any]
    all_reduce: Callable[[Any], Any]
    max_num_tokens: int
    quantizes: bool = False

    @property
    def overlap(self) -> Overlap | None:
        """The kernel's attribute `overlap`, or None."""
        found: Overlap | None = getattr(self.kernel, "overlap", None)
        return found
