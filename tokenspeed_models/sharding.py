"""How activations are sharded at module boundaries, and the collectives that follow from it.

Modules annotate their inputs and outputs; no model calls a collective. `compile_sharding` derives the collectives
between adjacent modules and gives each one to the layer that passes the activation on. With one process there are
none. Imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tokenspeed_core.api import FUSED_OP, BuildContext, Collective, FusedCollective

Bind = Callable[[Callable[[Any], Any]], None]
Fuse = Callable[[BuildContext, FusedCollective], None]
SendParts = Callable[[FusedCollective], None]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every process of the group holds the whole tensor."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Every process of a group holds a slice along `axis`, such as "heads" or "vocab"."""

    axis: str
    group: str

    def __str__(self) -> str:
        return f"sharded on {self.axis}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every process of the groups holds a summand; the tensor is their sum."""

    groups: tuple[str, ...]

    def __str__(self) -> str:
        return "a partial sum"


Sharding = Replicated | Sharded | Partial


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The sharding of a module's input and output.

    `size` counts the output's values of a token on all processes. `bind` receives the kernel of each collective that the
    output needs, in order. `dtype` is that of the output, None for the model's. A module that `takes_all_tokens` shares
    its weights with engines that have other tokens, and computes the tokens of all. One with a `routed_share` receives
    only the tokens that are routed to its weights, and returns their results; on average, each process sends a token of
    its engine to this share of the processes.

    An output that `is_added` is added to the residual stream, before anything else reads it. `fuse` receives the
    kernels that add up such outputs of all processes, for a norm that can use them; it replaces `bind` of the module
    before. `fused_op` is the op of these kernels: FUSED_OP, or one that also quantizes. `send_parts` lets a module send
    parts of such an output while it computes the rest; only the next norm may then read it.
    """

    module: str
    input: Sharding
    output: Sharding
    size: int
    bind: Bind | None = None
    dtype: str | None = None
    takes_all_tokens: bool = False
    routed_share: float | None = None
    is_added: bool = False
    fuse: Fuse | None = None
    fused_op: str = FUSED_OP
    send_parts: SendParts | None = None


def bind_output(
    specs: Iterable[ShardingSpec], bind: Bind, *, is_added: bool = False
) -> Iterator[ShardingSpec]:
    """Yield the specs of a block; `bind` receives the collective that the last module's output needs.

    Raises ValueError for a block without specs.
    """
    found = list(specs)
    if not found:
        name = getattr(specs, "__qualname__", "sharding")
        raise ValueError(f"{name} yields no ShardingSpec. Yield one for the output of the block.")
    yield from found[:-1]
    yield replace(found[-1], bind=bind, is_added=is_added)


def fuse_input(
    specs: Iterable[ShardingSpec], fuse: Fuse, fused_op: str = FUSED_OP
) -> Iterator[ShardingSpec]:
    """Yield the spec of a norm; `fuse` receives the kernels that add up its input, if it is a partial sum."""
    for spec in specs:
        yield replace(spec, fuse=fuse, fused_op=fused_op)


def compile_sharding(build: BuildContext, specs: Iterable[ShardingSpec]) -> None:
    """Bind the collectives that a chain of modules needs.

    Raises ValueError if no collective converts the output of a module into the input of the next, or if nothing
    executes it there.
    """
    for source, target in pairwise(specs):
        where = f"{source.module} -> {target.module}"
        output, needed = _effective(build, source.output), _effective(build, target.input)
        found = _collectives_of_tokens(build, source, target, output, needed, where)
        if found is None:
            found = _collectives(output, needed, where)
        if found and source.bind is None:
            raise ValueError(
                f"{where}: the layer that calls {source.module} cannot execute {found[0][0]}"
            )
        for op, group in found:
            collective = Collective(
                op,
                group,
                source.size,
                source.dtype or str(build.dtype).removeprefix("torch."),
                source.module,
                target.module,
                _reason(source, target, output, needed, op),
                1.0 if target.routed_share is None else target.routed_share,
                fused_op=target.fused_op,
            )
            if not _fuse(build, source, target, collective, is_alone=len(found) == 1):
                assert source.bind is not None, "checked above"
                source.bind(build.comm(collective))


def _fuse(
    build: BuildContext,
    source: ShardingSpec,
    target: ShardingSpec,
    collective: Collective,
    *,
    is_alone: bool,
) -> bool:
    """Let the next norm take over an all-reduce between two modules, if it can. Return whether it does.

    If no other collective comes before it (`is_alone`), the module before may send its output in parts.
    """
    if collective.op != "all_reduce" or not source.is_added or target.fuse is None:
        return False
    fused = build.fused_comm(collective)
    if fused is None:
        return False
    target.fuse(build, fused)
    if fused.overlap is not None and source.send_parts is not None and is_alone:
        source.send_parts(fused)
    return True


def _reason(
    source: ShardingSpec, target: ShardingSpec, output: Sharding, needed: Sharding, op: str
) -> str:
    if op == "all_gather_tokens":
        return f"{target.module} needs the tokens of all engines after {source.module}"
    if op == "exchange_tokens":
        return f"{target.module} needs the tokens of all engines that {source.module} routes to it"
    if op == "reduce_scatter_tokens":
        return (
            f"the output of {source.module} is {output} for the tokens of all engines, and {target.module} needs "
            "its own"
        )
    return f"the output of {source.module} is {output}, and {target.module} needs it {needed}"


def _collectives_of_tokens(
    build: BuildContext,
    source: ShardingSpec,
    target: ShardingSpec,
    output: Sharding,
    needed: Sharding,
    where: str,
) -> list[tuple[str, str]] | None:
    """Return the ops between an engine's own tokens and those of all, with their groups; None if neither changes."""
    data, engine = build.group("data"), build.group("engine")
    if target.routed_share is not None:
        if data.size == 1 or not set(build.group("moe").ranks) <= set(engine.ranks):
            raise ValueError(
                f"{where}: tokens are routed only between engines that hold whole experts; set --data-parallel-size with "
                "--enable-expert-parallel and --moe-tp-size 1, or choose another --all2all-backend"
            )
        return [("exchange_tokens", "experts")]
    if data.size == 1 or source.takes_all_tokens == target.takes_all_tokens:
        return None
    if target.takes_all_tokens and output == needed == Replicated():
        return [("all_gather_tokens", data.name)]
    if source.takes_all_tokens and needed == Replicated():
        match output:
            case Partial((group,)) if build.group(group).ranks == build.group("world").ranks:
                found = [("reduce_scatter_tokens", data.name)]
                return found if engine.size == 1 else [*found, ("all_reduce", engine.name)]
    raise ValueError(
        f"{where}: no collective between {output} and {needed} for engines with their own tokens"
    )


def _effective(build: BuildContext, sharding: Sharding) -> Sharding:
    """Return a sharding without groups of one process, which divide nothing."""
    match sharding:
        case Sharded(_, group) if build.group(group).size == 1:
            return Replicated()
        case Partial(groups):
            sharing = tuple(name for name in groups if build.group(name).size > 1)
            if len(sharing) > 1:  # together they are all processes
                sharing = ("world",)
            return Partial(sharing) if sharing else Replicated()
    return sharding


def _collectives(output: Sharding, needed: Sharding, where: str) -> list[tuple[str, str]]:
    """Return the op that converts one sharding into another and its group; none if they are equal."""
    if output == needed:
        return []
    match output, needed:
        case (Partial((group,)), Replicated()):
            return [("all_reduce", group)]
        case (Sharded(_, group), Replicated()):
            return [("all_gather", group)]
    raise ValueError(f"{where}: no collective converts {output} to {needed}")
