"""Scheduling policies of plugins: found by name, made by their factory, checked before they are used."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from null_world import World, request

from tokenspeed_core.api import (
    Candidate,
    Decision,
    FullAttention,
    Limits,
    ModelInfo,
    ModelSpec,
    Policy,
    Room,
    View,
)
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.plugins.kinds import KINDS
from tokenspeed_core.scheduler.policy import POLICIES, Ordered
from tokenspeed_core.scheduler.policy_plugins import PluginPolicy, find_policy

HERE = "policies_under_test"


class LastFirst:
    """The last to arrive runs first; the rest is as first come, first served."""

    def __init__(self) -> None:
        self.inner = Ordered(by_priority=False)

    def key(self, priority: int, arrival: int) -> tuple[int, int]:
        return (0, -arrival)

    def decide(self, view: View, limits: Limits) -> Decision:
        return self.inner.decide(view, limits)

    def admit(self, candidate: Candidate, room: Room) -> int:
        return self.inner.admit(candidate, room)


def broken() -> Policy:
    raise RuntimeError("no licence")


def describe(config: dict[str, Any]) -> ModelInfo:
    return ModelInfo("Tiny", 7, 8, "float32", 1, 10, (FullAttention("full", 1, 1, 4),), (2,), None)


TINY = ModelSpec("Tiny", f"{HERE}:describe", f"{HERE}:Tiny")


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    info = tmp_path / "site" / "lifo-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lifo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[tokenspeed.models]\nTiny = {HERE}:TINY [api1]\n[tokenspeed.policies]\nlifo = {HERE}:LastFirst [api1]\n"
        f"broken = {HERE}:broken [api1]\nno_policy = {HERE}:dict [api1]\nno_factory = {HERE}:HERE [api1]\n"
        f"fcfs = {HERE}:LastFirst [api1]\n"
    )
    return Catalog.discover(
        Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")])
    )


def test_a_plugins_policy_is_what_the_name_resolves_to(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    policy = resolve(Config(model=str(tmp_path), schedule_policy="lifo"), catalog).policy
    assert isinstance(policy, PluginPolicy)
    assert isinstance(policy.policy, LastFirst)
    assert resolve(Config(model=str(tmp_path)), catalog).policy == POLICIES["fcfs"]
    with pytest.raises(PluginError, match="did you mean priority"):
        resolve(Config(model=str(tmp_path), schedule_policy="prioritty"), catalog)


def test_a_plugin_cannot_take_the_place_of_a_built_in_policy(catalog: Catalog) -> None:
    assert isinstance(find_policy("fcfs", catalog), Ordered)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "failed in policies_under_test:broken: RuntimeError: no licence"),
        ("no_policy", "returned a dict, not a Policy"),
        ("no_factory", "TypeError"),
        ("fcsf", "no policies named 'fcsf'; installed: broken, fcfs, lifo,"),
    ],
)
def test_a_policy_that_cannot_be_had_is_one_line(
    catalog: Catalog, name: str, said: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "dict", dict)  # a class that makes no policy
    with pytest.raises(PluginError) as caught:
        find_policy(name, catalog)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert name == "fcsf" or "--schedule-policy" in str(caught.value)


def test_a_plugins_policy_decides_who_runs(catalog: Catalog) -> None:
    world = World(policy=find_policy("lifo", catalog), max_num_seqs=1)
    for sequence_id in range(3):
        world.submit(request(sequence_id, [1, 2, sequence_id], max_tokens=4))
    world.run()
    assert list(world.finish) == [2, 1, 0]
    for sequence_id in range(3):
        world.check(sequence_id)


def fails(*given: Any) -> Any:
    raise LookupError("no such tenant")


def runs_all(self: LastFirst, view: View, limits: Limits) -> Decision:
    return Decision(view.num_query_tokens, np.zeros(0, np.int32))


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("key", fails, "LastFirst.key: LookupError: no such tenant"),
        (
            "key",
            lambda *given: None,
            "LastFirst.key returned a NoneType, not a tuple",
        ),
        ("decide", fails, "LastFirst.decide: LookupError: no such tenant"),
        (
            "decide",
            lambda *given: None,
            "LastFirst.decide: AttributeError: 'NoneType' object has no",
        ),
        ("decide", runs_all, "LastFirst.decide: ValueError: a row runs without its blocks"),
        ("admit", fails, "LastFirst.admit: LookupError: no such tenant"),
        ("admit", lambda *given: None, "LastFirst.admit: TypeError: int() argument must be"),
    ],
)
def test_failing_policy_ends_the_engine(
    catalog: Catalog,
    method: str,
    does: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(policy=find_policy("lifo", catalog), num_blocks=14, prefix_caching=False)
    monkeypatch.setattr(LastFirst, method, does)

    def serve() -> None:
        for sequence_id in range(4):  # more than the pool has blocks for
            world.submit(request(sequence_id, [sequence_id, 2, 3], max_tokens=30))
        world.run()

    with pytest.raises(PluginError) as caught:
        serve()
    message = str(caught.value)
    assert message.startswith("policies lifo of lifo 1.0 failed")
    assert f"{HERE}:{said}" in message
    assert "--schedule-policy" in message
    assert "\n" not in message


VIEW = View(
    slots=np.arange(3, dtype=np.int32),
    num_decodes=1,
    num_query_tokens=np.asarray([1, 9, 9], np.int32),
    num_new_blocks=np.ones(3, np.int32),
    num_held_blocks=np.ones(3, np.int32),
    priority=np.zeros(3, np.int32),
    arrival=np.arange(3),
)
LIMITS = Limits(
    token_budget=32,
    max_prefill_tokens=32,
    is_chunking=True,
    num_available_blocks=2,
    num_pending_blocks=0,
)


@pytest.mark.parametrize(
    ("num_query", "victims", "error"),
    [
        ([1, 9, 9], [], "ValueError"),  # a block too many
        ([1, 9, 0], [1], "ValueError"),  # a victim that runs
        ([1, 9, 0], [2, 2], "ValueError"),  # one named twice
        ([1, 9, 0], [3], "IndexError"),  # one that is not there
        ([1, 9], [], "ValueError"),  # a row forgotten
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_put_down_to_the_plugin(
    catalog: Catalog,
    num_query: list[int],
    victims: list[int],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decision = Decision(np.asarray(num_query, np.int32), np.asarray(victims, np.int32))
    monkeypatch.setattr(LastFirst, "decide", lambda *given: decision)
    with pytest.raises(
        PluginError, match=f"^policies lifo of lifo 1.0 failed in {HERE}:LastFirst.decide: {error}"
    ):
        find_policy("lifo", catalog).decide(VIEW, LIMITS)


def test_no_row_gets_more_than_it_wants_or_less_than_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = Decision(np.asarray([7, -4, 12]), np.zeros(0, np.int32))
    monkeypatch.setattr(LastFirst, "decide", lambda *given: decision)
    decided = find_policy("lifo", catalog).decide(VIEW, LIMITS)
    assert decided.num_query_tokens.tolist() == [1, 0, 9]
    assert decided.num_query_tokens.dtype == np.int32


def test_the_names_that_are_built_in_are_the_schedulers() -> None:
    assert KINDS["policies"].built_in == tuple(POLICIES)
