"""The settings of an engine with several processes, and the process groups that they define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pydantic import model_validator

from tokenspeed_core.api.parallel import ParallelLayout
from tokenspeed_core.config.settings import Settings, flag, setting

LOCAL = "local"  # the built-in executor
_SIZES = (
    "tensor_parallel_size",
    "attn_tp_size",
    "dense_tp_size",
    "moe_tp_size",
    "expert_parallel_size",
    "world_size",
    "nprocs_per_node",
    "nnodes",
)


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """The sizes of the process groups, the number of nodes, the processes of an engine on each node, and the engines.

    If the engines share experts (`shares_experts`), `moe` and `experts` count the processes of all engines. `flags` are
    the given flags that set the sizes, for messages.
    """

    attn: int
    dense: int
    moe: int
    experts: int
    num_nodes: int
    num_per_node: int
    num_engines: int = 1
    shares_experts: bool = False
    flags: str = ""

    @property
    def num_sharing(self) -> int:
        """The number of engines that share the experts; 1: every engine has its own."""
        return self.num_engines if self.shares_experts else 1

    @property
    def world_size(self) -> int:
        """The number of processes of an engine."""
        return self.num_nodes * self.num_per_node

    def describe(self, *, has_experts: bool) -> str:
        """Return the engines, their processes and the process groups of the model in one line."""
        where = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        found = f"{_count(self.world_size)}{where}"
        if self.shares_experts:
            found = f"{self.num_engines} engines of {found} share the experts"
        elif self.num_engines > 1:
            found = f"{self.num_engines} engines of {found} each"
        groups = []
        if self.world_size > 1:
            groups += [f"attention TP {self.attn}", f"dense TP {self.dense}"]
        if has_experts and (groups or self.shares_experts):
            groups += [f"MoE TP {self.moe}", f"EP {self.experts}"]
        return f"{found}: {', '.join(groups)}" if groups else found

    def layout(self, rank: int, replica: int = 0) -> ParallelLayout:
        """Return the process groups of a rank of an engine. Raises ValueError if the sizes do not go together."""
        return ParallelLayout.of(
            rank if self.num_sharing == 1 else replica * self.world_size + rank,
            attn=self.attn,
            dense=self.dense,
            moe=self.moe,
            experts=self.experts,
            data=self.num_sharing,
            flags=self.flags,
        )


def _count(num_processes: int) -> str:
    return "one process" if num_processes == 1 else f"{num_processes} processes"


def _processes(text: str, **options: Any) -> Any:
    """Declare a setting that is a number of processes."""
    return setting(None, "parallel", text, unit="processes", ge=1, le=4096, **options)


class ParallelSettings(Settings):
    """How many processes share a model, and where they run. `Config` inherits these settings."""

    tensor_parallel_size: int | None = _processes(
        "Processes that share the model; default of --attn-tp-size and --dense-tp-size.",
        also=("tp",),
    )
    attn_tp_size: int | None = _processes(
        "Processes that share attention heads: 1 or all; default: --tensor-parallel-size."
    )
    dense_tp_size: int | None = _processes(
        "Processes that share MLPs: a divisor of all; default: --tensor-parallel-size."
    )
    moe_tp_size: int | None = _processes(
        "Processes that share each expert; default: --tp divided by --ep-size."
    )
    data_parallel_size: int = setting(
        1,
        "parallel",
        "Number of engines (replicas) among which requests are distributed.",
        unit="engines",
        is_for_servers=True,
        ge=1,
        le=64,
    )
    enable_expert_parallel: bool = setting(
        False, "parallel", "Distribute whole experts over all processes of all engines."
    )
    expert_parallel_size: int | None = setting(
        None,
        "parallel",
        "Groups of processes among which experts are distributed; default: 1.",
        unit="groups",
        also=("ep_size",),
        ge=1,
        le=4096,
    )
    enable_eplb: bool = setting(
        False, "parallel", "Balance the load of experts by moving them between processes."
    )
    num_redundant_experts: int = setting(
        0,
        "parallel",
        "Number of expert replicas, over all processes, with --enable-eplb.",
        unit="experts",
        ge=0,
        le=4096,
    )
    eplb_interval: int = setting(
        3000,
        "parallel",
        "Steps between rebalancings of experts with --enable-eplb.",
        unit="steps",
        ge=4,
    )
    enable_allreduce_fusion: bool | None = setting(
        None,
        "parallel",
        "Fuse all-reduces with the next norm; default: between two GPUs of one machine.",
    )
    comm_fusion_max_num_tokens: int | None = setting(
        None,
        "parallel",
        "Largest step with fused all-reduces; default: 512 KiB, or any on two processes.",
        unit="tokens",
        ge=1,
        le=65536,
    )
    world_size: int | None = _processes(
        "Number of processes of the engine; default: the largest of the other sizes."
    )
    nprocs_per_node: int | None = setting(
        None,
        "parallel",
        "Number of processes on each node; default: an equal share.",
        unit="processes",
        ge=1,
        le=64,
    )
    nnodes: int = setting(
        1, "parallel", "Number of nodes that run the engine.", unit="nodes", ge=1, le=1024
    )
    node_rank: int = setting(
        0,
        "parallel",
        "Rank of this node. Node 0 runs the server, the others only workers.",
        ge=0,
        le=1023,
    )
    dist_init_addr: str | None = setting(
        None,
        "parallel",
        "Address of node 0 for the other nodes, with a free port.",
        takes="HOST:PORT",
        min_length=1,
    )
    distributed_executor_backend: str = setting(
        LOCAL,
        "parallel",
        "Executor that starts the workers: local (subprocesses), or one from a plugin.",
        min_length=1,
        kind="executors",
    )

    @model_validator(mode="after")
    def _check_parallel_sizes(self) -> Self:
        if self.data_parallel_size > 1 and self.nnodes > 1:
            raise ValueError(
                "--data-parallel-size runs its engines on one machine; remove --nnodes, or start a server on each node"
            )
        sizes = self.parallel_sizes()
        self._check_balance(sizes.experts)
        self._check_fusion(sizes.world_size)
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank {self.node_rank} needs --nnodes {self.node_rank + 1} or more, but it is {self.nnodes}"
            )
        if self.dist_init_addr is not None:
            host, _, port = self.dist_init_addr.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"--dist-init-addr {self.dist_init_addr} must be HOST:PORT, such as node0:29500"
                )
            if host == "0.0.0.0":
                raise ValueError(
                    f"--dist-init-addr {self.dist_init_addr}: other nodes cannot connect to this address; give the name "
                    "or an address of node 0"
                )
        if sizes.shares_experts and self.distributed_executor_backend != LOCAL:
            raise ValueError(
                "--data-parallel-size with --enable-expert-parallel starts all processes itself; remove "
                f"--distributed-executor-backend {self.distributed_executor_backend}"
            )
        if self.distributed_executor_backend != LOCAL:
            self._refuse_own_nodes()
        elif self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError("--nnodes needs --dist-init-addr, the address of node 0")
        elif self.nnodes == 1 and self.dist_init_addr is not None:
            raise ValueError("--dist-init-addr has no effect without --nnodes")
        if sizes.world_size == 1 and self.distributed_executor_backend != LOCAL:
            raise ValueError(
                f"--distributed-executor-backend {self.distributed_executor_backend} has no effect on one process; "
                "set --tensor-parallel-size"
            )
        return self

    def _check_balance(self, num_groups: int) -> None:
        """Raise ValueError for settings of the experts' balance that have no effect or do not fit the groups."""
        if self.enable_eplb and num_groups == 1:
            change = (
                "set --enable-expert-parallel with --tensor-parallel-size or --data-parallel-size"
            )
            if self.enable_expert_parallel and self.moe_tp_size is not None:
                change = f"remove --moe-tp-size {self.moe_tp_size}"
            raise ValueError(
                "--enable-eplb moves experts between processes, but here every process has all experts or a part of "
                f"each; {change}"
            )
        for name in ("num_redundant_experts", "eplb_interval"):
            if not self.enable_eplb and self._is_changed(name):
                raise ValueError(f"{flag(name)} has no effect without --enable-eplb")
        if self.num_redundant_experts % num_groups:
            raise ValueError(
                f"--num-redundant-experts {self.num_redundant_experts} cannot be divided among {num_groups} groups of "
                "processes; give a multiple"
            )

    def _check_fusion(self, num_processes: int) -> None:
        """Raise ValueError for settings of fused all-reduces that have no effect."""
        if self.enable_allreduce_fusion and num_processes == 1:
            raise ValueError(
                "--enable-allreduce-fusion has no effect: an engine of one process has no all-reduce; set "
                "--tensor-parallel-size"
            )
        if self.comm_fusion_max_num_tokens is not None and (
            self.enable_allreduce_fusion is False or num_processes == 1
        ):
            raise ValueError(
                "--comm-fusion-max-num-tokens has no effect without fused all-reduces: set --tensor-parallel-size, and "
                "remove --no-enable-allreduce-fusion"
            )

    def _refuse_own_nodes(self) -> None:
        """Raise ValueError for settings of nodes that are started one by one."""
        for name, value in (
            ("--node-rank", self.node_rank),
            ("--dist-init-addr", self.dist_init_addr),
        ):
            if value:
                raise ValueError(
                    f"{name} has no effect with --distributed-executor-backend "
                    f"{self.distributed_executor_backend}, which finds the nodes itself"
                )

    def parallel_sizes(self) -> ParallelSizes:
        """Return the sizes of the process groups. Raises ValueError if they contradict each other."""
        given = self._given_world_size()
        shares_experts = self.enable_expert_parallel and self.data_parallel_size > 1
        num_sharing = self.data_parallel_size if shares_experts else 1
        shared = self.tensor_parallel_size or given or 1
        attn, dense = self.attn_tp_size or shared, self.dense_tp_size or shared
        if self.enable_expert_parallel:
            own_experts = 1 if shares_experts else self.expert_parallel_size or 1
            world_size = given or max(shared, attn, dense, own_experts)
            moe = self.moe_tp_size or 1
            experts = max(1, num_sharing * world_size // moe)
            if self.expert_parallel_size not in (None, experts):
                raise ValueError(
                    f"{self._size_flags()}: --enable-expert-parallel makes --expert-parallel-size {experts}; remove one of "
                    "these two flags"
                )
        else:
            experts = self.expert_parallel_size or 1
            moe = self.moe_tp_size or max(1, shared // experts)
        world_size = given or max(shared, attn, dense, moe * experts // num_sharing)
        num_per_node = self.nprocs_per_node or max(1, world_size // self.nnodes)
        if num_per_node * self.nnodes != world_size:
            raise ValueError(
                f"{_count(world_size)} cannot be divided among --nnodes {self.nnodes}; set --nprocs-per-node, and sizes of "
                "groups that need --nnodes times --nprocs-per-node processes"
            )
        flags = self._size_flags()
        if shares_experts:
            flags += f" --data-parallel-size {num_sharing}"
            if moe * experts != num_sharing * world_size:
                raise ValueError(
                    f"{flags}: {num_sharing} engines with {num_sharing * world_size} processes share the experts, and "
                    f"--moe-tp-size {moe} does not divide this number. Change one of these flags."
                )
        sizes = ParallelSizes(
            attn,
            dense,
            moe,
            experts,
            self.nnodes,
            num_per_node,
            num_engines=self.data_parallel_size,
            shares_experts=shares_experts,
            flags=flags,
        )
        self._check_groups(sizes)
        return sizes

    def _check_groups(self, sizes: ParallelSizes) -> None:
        """Raise ValueError for sizes of process groups that do not go together."""
        world_size, dense = sizes.world_size, sizes.dense
        of_experts = sizes.moe * sizes.experts // sizes.num_sharing
        change, problem = "Change one of these flags", ""
        if self.tensor_parallel_size not in (None, 1, world_size):
            sizes_allowed = "1" if world_size == 1 else f"{world_size} or 1"
            problem = f"--tensor-parallel-size must be {sizes_allowed}"
        elif sizes.attn not in (1, world_size):
            problem = f"Attention TP must be {world_size} or 1, not {sizes.attn}"
        elif world_size % dense:
            problem = f"Dense TP must divide {world_size}, but it is {dense}"
        elif of_experts not in (1, world_size):
            problem = f"MoE TP x EP must be {world_size} or 1, not {sizes.moe} x {sizes.experts}"
            if self.expert_parallel_size is None and world_size % sizes.moe == 0:
                change += f", or add --expert-parallel-size {world_size // sizes.moe}"
        elif world_size not in (sizes.attn, dense, of_experts):
            problem = (
                f"One of the process groups must have all of them; found attention TP {sizes.attn}, dense TP {dense}, "
                f"MoE TP x EP {of_experts}"
            )
        elif self.enable_expert_parallel and sizes.num_sharing == sizes.experts == 1:
            problem = "--enable-expert-parallel has no effect"
            if world_size == 1:
                change = "Set --tensor-parallel-size or --data-parallel-size, or remove it"
            else:
                problem += f" with --moe-tp-size {sizes.moe}"
        if problem:
            raise ValueError(
                f"{sizes.flags}: the engine has {_count(world_size)}. {problem}. {change}."
            )

    def _size_flags(self) -> str:
        """Return the given flags for the sizes of process groups, with their values."""
        flags = [f"{flag(name)} {getattr(self, name)}" for name in _SIZES if self._is_changed(name)]
        return " ".join([*flags, *["--enable-expert-parallel"] * self.enable_expert_parallel])

    def _is_changed(self, name: str) -> bool:
        """Return whether a setting differs from its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def _given_world_size(self) -> int | None:
        """Return the number of processes that the settings give, if any.

        Raises ValueError if they contradict each other.
        """
        product = None if self.nprocs_per_node is None else self.nnodes * self.nprocs_per_node
        if self.world_size is not None and product not in (None, self.world_size):
            raise ValueError(
                f"--world-size {self.world_size} is not --nnodes {self.nnodes} times --nprocs-per-node "
                f"{self.nprocs_per_node}"
            )
        return self.world_size or product
