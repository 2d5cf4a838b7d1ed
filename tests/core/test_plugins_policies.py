"""Scheduling policies of plugins: creation, and checks of their answers."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_world import World
from tokenspeed_testing.requests import request

from tokenspeed_core.api import (
    Candidate,
    Decision,
    FullAttention,
    Limits,
    ModelInfo,
    ModelSpec,
    Policy,
    QueuedSequence,
    Room,
    View,
)
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.plugins.kinds import KINDS
from tokenspeed_core.scheduler.plugin_policy import PluginPolicy, find_policy
from tokenspeed_core.scheduler.policy import POLICIES, Ordered

HERE = "policies_under_test"


class LastFirst:
    """Last come, first served."""

    def __init__(self) -> None:
        self.inner = Ordered(by_priority=False)

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        return (0, -sequence.arrival)

    def decide(self, view: View, limits: Limits) -> Decision:
        return self.inner.decide(view, limits)

    def admit(self, candidate: Candidate, room: Room) -> int:
        return self.inner.admit(candidate, room)


class ShortestFirst(LastFirst):
    """The sequence with the least work left comes first, of all tenants."""

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        return (sequence.num_tokens + sequence.max_tokens, sequence.arrival)


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
        f"sjf = {HERE}:ShortestFirst [api1]\n"
        f"broken = {HERE}:broken [api1]\nno_policy = {HERE}:dict [api1]\nno_factory = {HERE}:HERE [api1]\n"
        f"fcfs = {HERE}:LastFirst [api1]\n"
    )
    return Catalog.discover(
        Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")])
    )


def test_plugin_policy_is_found_by_name(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    policy = resolve(Config(model=str(tmp_path), schedule_policy="lifo"), catalog).policy
    assert isinstance(policy, PluginPolicy)
    assert isinstance(policy.policy, LastFirst)
    assert resolve(Config(model=str(tmp_path)), catalog).policy == POLICIES["fcfs"]
    with pytest.raises(PluginError, match="prioritty"):
        resolve(Config(model=str(tmp_path), schedule_policy="prioritty"), catalog)


def test_plugin_cannot_replace_a_built_in_policy(catalog: Catalog) -> None:
    assert isinstance(find_policy("fcfs", catalog), Ordered)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("broken", f"{HERE}:broken"),
        ("no_policy", f"{HERE}:dict"),
        ("no_factory", f"{HERE}:HERE"),
        ("fcsf", "fcfs"),
    ],
)
def test_unusable_policy_is_a_plugin_error(
    catalog: Catalog, name: str, named: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "dict", dict)  # a class that makes no policy
    with pytest.raises(PluginError, match=name) as caught:
        find_policy(name, catalog)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plugin_policy_orders_sequences(catalog: Catalog) -> None:
    world = World(policy=find_policy("lifo", catalog), max_num_seqs=1)
    for sequence_id in range(3):
        world.submit(request(sequence_id, [1, 2, sequence_id], max_tokens=4))
    world.run()
    assert list(world.finish) == [2, 1, 0]
    for sequence_id in range(3):
        world.check(sequence_id)


def test_plugin_policy_may_run_the_shortest_first(catalog: Catalog) -> None:
    world = World(policy=find_policy("sjf", catalog), max_num_seqs=1)
    lengths = {0: (9, 6), 1: (3, 9), 2: (5, 2), 3: (2, 2)}  # prompt and output
    for sequence_id, (num_prompt, max_tokens) in lengths.items():
        prompt = [sequence_id, *range(1, num_prompt)]
        world.submit(request(sequence_id, prompt, max_tokens=max_tokens, tenant=str(sequence_id)))
    world.run()
    assert list(world.finish) == [3, 2, 1, 0]


def fails(*given: Any) -> Any:
    raise LookupError("no such tenant")


def runs_all(self: LastFirst, view: View, limits: Limits) -> Decision:
    return Decision(view.num_query_tokens, np.zeros(0, np.int32))


@pytest.mark.parametrize(
    ("method", "does", "error"),
    [
        ("key", fails, "LookupError"),
        ("key", lambda *given: None, "NoneType"),
        ("decide", fails, "LookupError"),
        ("decide", lambda *given: None, "AttributeError"),
        ("decide", runs_all, "ValueError"),
        ("admit", fails, "LookupError"),
        ("admit", lambda *given: None, "TypeError"),
    ],
)
def test_failing_policy_ends_the_engine_and_names_its_plugin(
    catalog: Catalog,
    method: str,
    does: Any,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(policy=find_policy("lifo", catalog), num_pages=14, prefix_caching=False)
    monkeypatch.setattr(LastFirst, method, does)

    def serve() -> None:
        for sequence_id in range(4):  # more than the pool has blocks for
            world.submit(request(sequence_id, [sequence_id, 2, 3], max_tokens=30))
        world.run()

    with pytest.raises(PluginError, match=rf"{HERE}:LastFirst\.{method}\b.*{error}") as caught:
        serve()
    assert "lifo 1.0" in str(caught.value)
    assert "\n" not in str(caught.value)


VIEW = View(
    slots=np.arange(3, dtype=np.int32),
    num_decodes=1,
    num_query_tokens=np.asarray([1, 9, 9], np.int32),
    num_new_pages=np.ones(3, np.int32),
    num_held_pages=np.ones(3, np.int32),
    priority=np.zeros(3, np.int32),
    arrival=np.arange(3),
)
LIMITS = Limits(
    token_budget=32,
    max_prefill_tokens=32,
    is_chunking=True,
    num_available_pages=2,
    num_pending_pages=0,
)


@pytest.mark.parametrize(
    ("num_query", "victims", "error"),
    [
        ([1, 9, 9], [], "ValueError"),  # one block too many
        ([1, 9, 0], [1], "ValueError"),  # a victim that runs
        ([1, 9, 0], [2, 2], "ValueError"),  # one named twice
        ([1, 9, 0], [3], "IndexError"),  # one that is not there
        ([1, 9], [], "ValueError"),  # a row forgotten
    ],
)
def test_invalid_decision_is_a_plugin_error(
    catalog: Catalog,
    num_query: list[int],
    victims: list[int],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decision = Decision(np.asarray(num_query, np.int32), np.asarray(victims, np.int32))
    monkeypatch.setattr(LastFirst, "decide", lambda *given: decision)
    with pytest.raises(PluginError, match=rf"lifo 1\.0.*LastFirst\.decide.*{error}"):
        find_policy("lifo", catalog).decide(VIEW, LIMITS)


def test_decision_grants_no_more_tokens_than_requested(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = Decision(np.asarray([7, -4, 12]), np.zeros(0, np.int32))
    monkeypatch.setattr(LastFirst, "decide", lambda *given: decision)
    decided = find_policy("lifo", catalog).decide(VIEW, LIMITS)
    assert decided.num_query_tokens.tolist() == [1, 0, 9]
    assert decided.num_query_tokens.dtype == np.int32


def test_built_in_names_are_listed() -> None:
    assert KINDS["policies"].built_in == tuple(POLICIES)
