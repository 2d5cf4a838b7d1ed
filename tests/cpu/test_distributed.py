"""The torch.distributed groups of a process: the ones that it creates, and the ones that an abort ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from tokenspeed_core.api import ParallelLayout
from tokenspeed_core.api.step import StepFailed
from tokenspeed_core.worker import distributed


class Group:
    """A group of torch.distributed that records its end."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.is_aborted = tuple(ranks), False

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Return the groups that this process creates. The first one is the world of four processes."""
    world = Group([0, 1, 2, 3])
    groups = [world]

    def new_group(ranks: list[int]) -> Group:
        groups.append(Group(ranks))
        return groups[-1]

    fake: dict[str, Any] = {
        "is_initialized": lambda: False,
        "init_process_group": lambda *arguments, **keywords: None,
        "new_group": new_group,
        "get_backend": lambda group: "nccl",
        "group": SimpleNamespace(WORLD=world),
        "FileStore": lambda *arguments: None,
    }
    monkeypatch.setattr(distributed, "dist", SimpleNamespace(**fake))
    monkeypatch.setattr(distributed, "_GROUPS", [])
    return groups


def test_processes_that_cannot_connect_give_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    layout = ParallelLayout.of(0, attn=2)
    with pytest.raises(StepFailed, match=r"cannot connect to each other: .*none0"):
        distributed.init(layout, f"file://{tmp_path}/store", torch.device("cpu"))
    assert distributed_c10d.get_pg_count() == 0, "the next groups would have other names"


@pytest.mark.parametrize("rank", range(4))
def test_abort_ends_the_group_of_mlps(rank: int, made: list[Group], tmp_path: Path) -> None:
    layout = ParallelLayout.of(rank, attn=4, dense=2, experts=4)
    handles = distributed.init(layout, f"file://{tmp_path}/store", torch.device("cpu"))
    try:
        assert [group.ranks for group in made] == [(0, 1, 2, 3), (0, 1), (2, 3)]
        assert handles["dense"].ranks == layout.group("dense").ranks
        assert handles["attn"] is handles["experts"] is made[0]
        distributed.abort()
        assert [group.is_aborted for group in made] == [rank in group.ranks for group in made]
    finally:
        distributed.close()
