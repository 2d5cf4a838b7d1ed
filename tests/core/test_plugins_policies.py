"""Scheduling policies of plugins: found by name, made by their factory, checked before they are used."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.api import Candidate, Decision, FullAttention, Limits, ModelInfo, ModelSpec, Policy, Room, View
from tokenspeed_core.config import Config
from tokenspeed_core.engine.launch import find_policy, resolve
from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.plugins.kinds import KINDS
from tokenspeed_core.scheduler.policy import POLICIES, Ordered

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
        f"fcfs = {HERE}:LastFirst [api1]\n")
    return Catalog.discover(Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")]))


def test_a_plugins_policy_is_what_the_name_resolves_to(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    assert isinstance(resolve(Config(model=str(tmp_path), schedule_policy="lifo"), catalog).policy, LastFirst)
    assert resolve(Config(model=str(tmp_path)), catalog).policy == POLICIES["fcfs"]()
    with pytest.raises(PluginError, match="did you mean priority"):
        resolve(Config(model=str(tmp_path), schedule_policy="prioritty"), catalog)


def test_a_plugin_cannot_take_the_place_of_a_built_in_policy(catalog: Catalog) -> None:
    assert isinstance(find_policy("fcfs", catalog), Ordered)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "policies_under_test:broken fails: RuntimeError: no licence"),
        ("no_policy", "makes a dict, which lacks what a Policy has"),
        ("no_factory", "fails: TypeError"),
        ("fcsf", "no policies named 'fcsf'; installed: broken, fcfs, lifo,"),
    ],
)
def test_a_policy_that_cannot_be_had_is_one_line(catalog: Catalog, name: str, said: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "dict", dict)  # a class that makes no policy
    with pytest.raises(PluginError) as caught:
        find_policy(name, catalog)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_names_that_are_built_in_are_the_schedulers() -> None:
    assert KINDS["policies"].built_in == tuple(POLICIES)
